"""`penstock models check`, and the same check before a registration."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.conftest import penstock
from tests.packages import write_double, write_package, write_raiser
from tests.servers import RedisServer


def needing_cuda(folder: Path) -> Path:
    """The package, for machines with a GPU only."""
    document = yaml.safe_load((folder / "model.yaml").read_text()) | {"device": "cuda"}
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    return folder


def test_package_that_works_is_told_step_by_step(tmp_path: Path, models_root: Path):
    """One line for each step, and exit status 0; --json prints the report alone."""
    folder = str(write_double(models_root))
    shown = penstock(tmp_path, "models", "check", folder, "--device", "cpu")
    assert shown.exit_code == 0, shown.output
    steps = [line.split()[0] for line in shown.stdout.splitlines()]
    assert steps == ["model.yaml", "inputs", "outputs", "files", "load", "example", "run", "latency", "double/1"]
    report = json.loads(penstock(tmp_path, "models", "check", folder, "--device", "cpu", "--json").stdout)
    assert report["outputs"] == {"y": {"dtype": "float32", "shape": [1, 4]}}


def test_sample_comes_from_a_file_or_stdin(tmp_path: Path, models_root: Path):
    """A wrong one is refused with its input and exit status 1."""
    folder = str(write_double(models_root))
    right = penstock(
        tmp_path, "models", "check", folder, "--device", "cpu", "--sample", "-", stdin='{"x": [[1, 2, 3, 4]]}'
    )
    assert "sample      x float32 (1, 4)\n" in right.stdout
    for sample, text in (
        ('{"x": [[1]]}', "x: shape (1, 1). Expected (batch, 4)"),
        ('{"z": 1}', "Missing required input(s): x. Unexpected input(s): z. Expected inputs: x"),
        ("[1]", "--sample: a list. Expected one object: a value for each input"),
        ("{", "--sample: no JSON ("),
    ):
        wrong = penstock(tmp_path, "models", "check", folder, "--device", "cpu", "--sample", "-", stdin=sample)
        assert wrong.exit_code == 1
        assert text in wrong.stderr


def test_exit_status_tells_the_package_from_the_machine(tmp_path: Path, models_root: Path):
    """1: the package is wrong, with the author's traceback; 78: this machine lacks what it needs."""
    raiser = str(write_raiser(models_root))
    wrong = penstock(
        tmp_path, "models", "check", raiser, "--device", "cpu", "--sample", "-", stdin='{"x": [[-1, 0, 0, 0]]}'
    )
    assert wrong.exit_code == 1
    assert "model.py" in wrong.stderr
    assert wrong.stderr.endswith("(ValueError: a negative row), expected outputs\n")
    lacking = penstock(tmp_path, "models", "check", str(needing_cuda(write_double(models_root))), "--device", "cpu")
    assert lacking.exit_code == EXIT_CONFIGURATION
    assert "expected cuda as its package says" in lacking.stderr


@pytest.mark.parametrize("is_checked", [True, False])
def test_package_that_cannot_work_is_not_registered(
    tmp_path: Path, models_root: Path, slot: str, shared_redis: RedisServer, is_checked: bool
):
    """`models register` loads the package first, unless it is told not to."""
    folder = str(write_package(models_root, slot, "nothing = 1"))
    arguments = ("models", "register", folder, *([] if is_checked else ["--no-check"]))
    shown = penstock(tmp_path, *arguments, PENSTOCK_REDIS_URL=shared_redis.url, PENSTOCK_INFERENCE_DEVICE="cpu")
    assert shown.exit_code == (1 if is_checked else 0)
    assert ("found no function build" in shown.stderr) == is_checked
    known = penstock(tmp_path, "models", "list", slot, "--json", PENSTOCK_REDIS_URL=shared_redis.url)
    assert (known.exit_code == 0) != is_checked


def test_machine_that_cannot_load_the_package_registers_it_and_says_so(
    tmp_path: Path, models_root: Path, slot: str, shared_redis: RedisServer
):
    """A machine with a registry may have no GPU and no framework."""
    folder = str(needing_cuda(write_double(models_root, slot)))
    environ = {"PENSTOCK_REDIS_URL": shared_redis.url, "PENSTOCK_INFERENCE_DEVICE": "cpu"}
    shown = penstock(tmp_path, "models", "register", folder, **environ)
    assert shown.exit_code == 0, shown.output
    assert "The package was not loaded here. " in shown.stderr


def test_every_model_of_a_python_file_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`@penstock.model` declares them, and modules beside the file are found; a mistake is named with its line."""
    monkeypatch.delitem(sys.modules, "beside_it", raising=False)
    file = tmp_path / "my_models.py"
    head = 'import penstock\nX = {"x": ("float32", ["batch"])}\n'
    declared = "@penstock.model(inputs=X, outputs=X)\n"
    (tmp_path / "beside_it.py").write_text("ONE = 1\n")
    text = f"{head}import beside_it\n{declared}def one(x):\n    return x\n"
    file.write_text(f"{text}{declared}def two(x):\n    return x + beside_it.ONE\n")
    shown = penstock(tmp_path, "models", "check", str(file), "--device", "cpu", "--json")
    assert [each["reference"] for each in json.loads(shown.stdout)] == ["one/1", "two/1"]
    file.write_text(f"{head}{declared}def one(z):\n    return z\n")
    wrong = penstock(tmp_path, "models", "check", str(file), "--device", "cpu")
    assert (wrong.exit_code, wrong.stderr) == (1, "Error: my_models.py, line 4: one: takes z, expected x\n")
    for command in ("up", "worker"):
        refused = penstock(tmp_path, command, "--app", str(file))
        assert refused.exit_code == EXIT_CONFIGURATION
        assert refused.stderr == "Error: my_models.py, line 4: one: takes z, expected x\n"
