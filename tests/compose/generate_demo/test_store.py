"""The writer under the home: made once, whole or not at all."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from penstock.compose.generate_demo.recipe import Recipe, Result
from penstock.compose.generate_demo.store import ready_writer
from penstock.registry.errors import ConfigurationError
from tests.servers import ROOT, wait_until

RECIPE = Recipe(positions=64, steps=1)
RESULT = Result(1000, 10, 2000, 64, 1, 6.0, 5.0, 1.5, 1)


class Maker:
    """Writes a file into the package, and counts how often."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, folder: Path) -> Result:
        self.calls += 1
        (folder / "model.safetensors").write_text("weights")
        return RESULT


def left(home: Path) -> set[str]:
    """What lies beside the lock, without what is whole."""
    found = {path.name for path in (home / "demo-writer").iterdir() if not (path / "made-from.json").exists()}
    return found - {"lock"}


def test_a_second_run_makes_nothing(tmp_path: Path):
    """The package is the same, with what the first run has found out. Another recipe makes another one beside it."""
    make = Maker()
    first = ready_writer(tmp_path, RECIPE, make)
    again = ready_writer(tmp_path, RECIPE, make)
    assert (first.is_new, again.is_new, make.calls) == (True, False, 1)
    assert (again.models_root, again.result) == (first.models_root, RESULT)
    package = first.models_root / "writer" / "1"
    assert (package / "model.safetensors").read_text() == "weights"
    assert yaml.safe_load((package / "model.yaml").read_text())["generate"]["max_model_len"] == 64
    other = ready_writer(tmp_path, replace(RECIPE, seed=99), make)
    assert (other.is_new, make.calls) == (True, 2)
    assert other.models_root != first.models_root
    assert ready_writer(tmp_path, RECIPE, make).is_new is False
    assert left(tmp_path) == set()


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_run_that_is_cut_leaves_nothing(tmp_path: Path, error: type[BaseException]):
    """The next one makes the whole."""

    def cut(folder: Path) -> Result:
        (folder / "model.safetensors").write_text("half")
        raise error

    with pytest.raises(error):
        ready_writer(tmp_path, RECIPE, cut)
    assert left(tmp_path) == set()
    assert [path.name for path in (tmp_path / "demo-writer").iterdir()] == ["lock"]
    assert ready_writer(tmp_path, RECIPE, Maker()).is_new


KILLED = """
import sys, time
from pathlib import Path
from penstock.compose.generate_demo.recipe import Recipe
from penstock.compose.generate_demo.store import ready_writer

def make(folder):
    (folder / "model.safetensors").write_text("half")
    print("half", flush=True)
    time.sleep(600)

ready_writer(Path(sys.argv[1]), Recipe(positions=64, steps=1), make)
"""


def test_what_a_killed_run_has_left_is_no_model(tmp_path: Path):
    """After kill -9 the next run does not wait for the lock, makes the whole, and removes the rest."""
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    with subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert len(left(tmp_path)) == 1
    writer = ready_writer(tmp_path, RECIPE, Maker())
    assert writer.is_new
    assert (writer.models_root / "writer" / "1" / "model.safetensors").read_text() == "weights"
    assert left(tmp_path) == set()


def test_two_runs_at_a_time_make_one_model(tmp_path: Path):
    """The second one waits, and has it, too."""
    make, may_end, has_begun = Maker(), threading.Event(), threading.Event()

    def slow(folder: Path) -> Result:
        has_begun.set()
        assert may_end.wait(180)
        return make(folder)

    found = []
    runs = [threading.Thread(target=lambda: found.append(ready_writer(tmp_path, RECIPE, slow))) for _ in range(2)]
    for run in runs:
        run.start()
    assert has_begun.wait(180)
    may_end.set()
    wait_until(lambda: len(found) == 2, 60, "both have it")
    for run in runs:
        run.join(60)
    assert (make.calls, sorted(each.is_new for each in found)) == (1, [False, True])


@pytest.mark.parametrize("marker", ["", "{", "{}", '{"recipe": {}, "python": "", "result": {}}'])
def test_a_folder_without_its_marker_is_made_again(tmp_path: Path, marker: str):
    """Whatever stands in the marker."""
    make = Maker()
    root = ready_writer(tmp_path, RECIPE, make).models_root
    (root / "made-from.json").write_text(marker)
    (root / "writer" / "1" / "model.safetensors").write_text("other")
    again = ready_writer(tmp_path, RECIPE, make)
    assert (again.is_new, make.calls) == (True, 2)
    assert (root / "writer" / "1" / "model.safetensors").read_text() == "weights"


def test_a_home_that_cannot_be_written_to_is_named(tmp_path: Path):
    """In one line, before anything is made."""
    (tmp_path / "demo-writer").write_text("a file")
    make = Maker()
    with pytest.raises(ConfigurationError, match="Expected a PENSTOCK_HOME that this user may write to"):
        ready_writer(tmp_path, RECIPE, make)
    assert make.calls == 0
