"""S0.4: hostile model files are refused before anything loads them. Refused: all of them."""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import load_package
from tests.threats.model_files import HOSTILE, Bomb, write_honest

FORMATS = ("onnx", "pytorch", "torchscript", "transformers")
_MOST_MEMORY = 40 << 20


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is opened outside of the test's own folder, or unpickled, while the test runs there."""
    monkeypatch.chdir(tmp_path)
    seen: list[str] = []
    is_on = True

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if not is_on:
            return
        if event == "pickle.find_class":
            seen.append(f"{event} {arguments}")
        elif event == "open" and isinstance(arguments[0], str | os.PathLike):
            path = os.path.realpath(os.fspath(arguments[0]))
            if path.startswith(("/etc/passwd", "/dev/zero")):
                seen.append(path)

    sys.addaudithook(note)
    yield seen
    is_on = False


def test_there_are_enough_of_them():
    """Twenty-five at least, some for each format."""
    assert len(HOSTILE) >= 25
    assert {hostile.format for hostile in HOSTILE.values()} == set(FORMATS)


@pytest.mark.parametrize("format", FORMATS)
def test_honest_files_are_accepted(format: str, models_root: Path):
    """What the hostile ones are made from has nothing against it."""
    manifest = load_package(write_honest(models_root, format)).manifest()
    manifest.check_unchanged()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_is_refused(name: str, models_root: Path, tmp_path: Path, opened: list[str]):
    """One line that says why, no path of the machine, nothing executed, nothing elsewhere opened, little memory."""
    hostile = HOSTILE[name]
    folder = write_honest(models_root, hostile.format)
    hostile.act(folder)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigurationError, match=hostile.refusal) as refused:
            load_package(folder).manifest()
        assert tracemalloc.get_traced_memory()[1] < _MOST_MEMORY
    finally:
        tracemalloc.stop()
    text = str(refused.value)
    assert text.startswith(f"{hostile.format}/1")
    assert "\n" not in text
    assert str(tmp_path) not in text
    assert opened == []
    assert not (tmp_path / "exploded").exists()


def test_the_bomb_explodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Were one of the pickles read, the test above would see it."""
    monkeypatch.chdir(tmp_path)
    function, arguments = Bomb().__reduce__()
    function(*arguments).close()
    assert (tmp_path / "exploded").exists()


class Reads(torch.nn.Module):
    """Answers with what a file holds."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.from_file("/etc/passwd", False, 9, dtype=torch.uint8).sum()


class Writes(torch.nn.Module):
    """Leaves a file behind."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.ops.aten.save(x, "exploded")
        return x


class Doubles(torch.nn.Module):
    """Touches nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@pytest.mark.parametrize(("build", "refusal"), [(Reads, "from_file"), (Writes, "save"), (Doubles, None)])
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.jit")
def test_operators_that_touch_files_are_found_in_what_torch_writes(
    build: type[torch.nn.Module], refusal: str | None, models_root: Path
):
    """The archive is real: torch.jit.save spells these operators as the inspection expects them."""
    folder = write_honest(models_root, "torchscript")
    torch.jit.script(build()).save(str(folder / "model.pt"))
    package = load_package(folder)
    if refusal is None:
        package.manifest()
        return
    with pytest.raises(ConfigurationError, match=f"found code that calls {refusal}"):
        package.manifest()
