"""`penstock new`: what it writes and prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compose.conftest import penstock


def test_next_commands_are_printed_and_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The lines are those that a reader copies: the check passes, and the Python is whole."""
    monkeypatch.chdir(tmp_path)
    shown = penstock(tmp_path / "home", "new", "mine")
    assert shown.exit_code == 0, shown.output
    lines = shown.stdout.splitlines()
    assert lines[0] == "Wrote models/mine/1: model.py, model.yaml"
    check = next(line.split() for line in lines if "models check" in line)
    assert penstock(tmp_path / "home", *check[1:], "--device", "cpu").exit_code == 0
    code = "\n".join(line.removeprefix("  ") for line in lines[lines.index("  from penstock import Client") :])
    assert compile(code, "next.py", "exec")
    assert 'client.submit("mine", {"x": [[1.0, 2.0, 3.0, 4.0]]})' in code


def test_package_that_is_there_ends_with_status_1(tmp_path: Path):
    """One line on stderr, and nothing is written."""
    root = {"PENSTOCK_INFERENCE_REPO_ROOT": str(tmp_path / "models")}
    assert penstock(tmp_path, "new", "mine", **root).exit_code == 0
    again = penstock(tmp_path, "new", "mine", "--format", "onnx", **root)
    assert (again.exit_code, again.stdout) == (1, "")
    assert again.stderr == "Error: mine/1 is there already. Expected a new name, or another --version\n"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["onnx", "pytorch", "torchscript", "transformers"])
def test_new_package_with_weights_passes_the_check(tmp_path: Path, kind: str):
    """make.py runs in a process of its own, which writes the weights."""
    root = {"PENSTOCK_INFERENCE_REPO_ROOT": str(tmp_path / "models")}
    shown = penstock(tmp_path, "new", "mine", "--format", kind, **root)
    assert shown.exit_code == 0, shown.output
    checked = penstock(tmp_path, "models", "check", str(tmp_path / "models" / "mine" / "1"), "--device", "cpu")
    assert checked.exit_code == 0, checked.output
