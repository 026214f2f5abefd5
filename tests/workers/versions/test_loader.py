"""Loads of versions beside the traffic: their number, their order, their time limit and their outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import load_package
from penstock.registry.settings_sections import InferenceConfig
from penstock.workers.runtime.base import Runtime
from penstock.workers.versions.loader import Loaded, Loader
from penstock.workers.versions.version import ServedVersion, VersionState
from tests.packages import write_package

SOURCE = """
def build():
    return lambda inputs: {"y": inputs["x"]}
"""
LIMIT_S = 10.0


OF_ITS_OWN = """from penstock.registry.errors import ConfigurationError
    raise type("OfItsOwn", (ConfigurationError,), {"__str__": lambda _: 1 / 0})"""
"""The end of a `build` that raises an error of ours without a text."""


class HeldLoader(Loader):
    """Each load begins at once and ends when the test says so, under the clock of the test."""

    def __init__(self) -> None:
        self.now = 0.0
        self.rings = 0
        self.begun: list[ServedVersion] = []
        self.runtimes: dict[ServedVersion, Runtime] = {}
        super().__init__("cpu", 1, timeout_s=LIMIT_S, ring=self._count_ring, clock=lambda: self.now)

    def _count_ring(self) -> None:
        self.rings += 1

    def begin(self, version: ServedVersion, runtime: Runtime) -> None:
        self.begun.append(version)
        self.runtimes[version] = runtime

    def finish(self, version: ServedVersion, problem: str = "", rows: int = 0) -> None:
        """The load of the version ends; without a problem its model is in memory."""
        if not problem:
            self.runtimes[version].load("cpu", 1)
        self.end(self.runtimes[version], problem, rows)


@pytest.fixture
def loader() -> HeldLoader:
    """A loader without threads."""
    return HeldLoader()


def versions(root: Path, number: int) -> list[ServedVersion]:
    """Versions of the model `scale`, on disk and not loaded; neither the package nor a setting gives a batch size."""
    folders = [
        write_package(root, "scale", SOURCE, version=str(label), max_batch_size=0) for label in range(1, number + 1)
    ]
    return [ServedVersion(load_package(folder, (root,)), InferenceConfig()) for folder in folders]


def test_two_loads_run_at_a_time_in_the_order_of_the_calls(loader: HeldLoader, models_root: Path):
    """The next one begins when an ended one was taken; all of them are loading from their call on."""
    first, second, third, fourth = every = versions(models_root, 4)
    for version in every:
        loader.load(version)
    assert {version.state for version in every} == {VersionState.LOADING}
    assert loader.begun == [first, second]
    loader.finish(second)
    assert loader.begun == [first, second]
    loader.take_done()
    assert loader.begun == [first, second, third]
    loader.finish(first)
    loader.take_done()
    assert loader.begun == [first, second, third, fourth]


def test_a_load_is_reported_once(loader: HeldLoader, models_root: Path):
    """Its end rings the I/O thread, which takes the outcome with the seconds since its beginning."""
    (version,) = versions(models_root, 1)
    assert not loader.is_busy
    loader.now = 1.0
    loader.load(version)
    assert (loader.is_busy, loader.take_done(), loader.rings) == (True, [], 0)
    loader.now = 4.5
    loader.finish(version)
    assert (loader.is_busy, loader.rings) == (True, 1)
    assert loader.take_done() == [Loaded(version, "", 3.5, 0)]
    assert (loader.is_busy, loader.take_done()) == (False, [])
    assert (version.is_ready, version.used_at) == (True, 4.5)


def test_a_failed_version_can_be_loaded_again(loader: HeldLoader, models_root: Path):
    """It names its problem and gets a new runtime for the next load."""
    (version,) = versions(models_root, 1)
    loader.load(version)
    loader.finish(version, "scale/1: no build")
    assert [done.problem for done in loader.take_done()] == ["scale/1: no build"]
    assert (version.state, version.problem) == (VersionState.FAILED, "scale/1: no build")
    failed = loader.runtimes[version]
    loader.load(version)
    assert version.problem == ""
    assert loader.runtimes[version] is not failed
    loader.finish(version)
    loader.take_done()
    assert version.is_ready


def test_the_same_problem_is_logged_once(loader: HeldLoader, models_root: Path, caplog: pytest.LogCaptureFixture):
    """A version that fails is tried again every few seconds; another problem is another line."""
    (version,) = versions(models_root, 1)
    for problem in ("no weights", "no weights", "no memory", "no memory"):
        loader.load(version)
        loader.finish(version, problem)
        loader.take_done()
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == ["model not loaded: no weights", "model not loaded: no memory"]


def test_an_overdue_load_fails_and_makes_room(loader: HeldLoader, models_root: Path):
    """Beyond the time limit, not at it: its version has failed, and the next load begins in its place."""
    hanging, later, queued = versions(models_root, 3)
    loader.load(hanging)
    loader.now = 1.0
    loader.load(later)
    loader.load(queued)
    loader.now = LIMIT_S
    assert loader.take_done() == []
    loader.now = LIMIT_S + 0.5
    assert loader.take_done() == [Loaded(hanging, "scale/1: loading took longer than 10 s", LIMIT_S + 0.5, 0)]
    assert (hanging.state, later.state) == (VersionState.FAILED, VersionState.LOADING)
    assert loader.begun == [hanging, later, queued]


def test_a_hanging_load_is_not_repeated_beside_itself(loader: HeldLoader, models_root: Path):
    """Another load of the version fails at once until the first one has ended; its late outcome is discarded."""
    (version,) = versions(models_root, 1)
    loader.load(version)
    loader.now = LIMIT_S + 1
    loader.take_done()
    late = loader.runtimes[version]
    loader.load(version)
    assert loader.begun == [version]
    assert version.problem == "scale/1: an earlier load of it has not ended yet"
    loader.end(late, "", 0)
    assert loader.take_done() == []
    assert version.state is VersionState.FAILED
    loader.load(version)
    assert loader.begun == [version, version]


def test_content_that_was_promoted_meanwhile_is_required(loader: HeldLoader, models_root: Path):
    """A promotion names other content during the load: the loaded one is not served, and nothing of it stays."""
    (version,) = versions(models_root, 1)
    loader.load(version)
    version.pin_content("ab" * 32)
    loader.finish(version)
    (done,) = loader.take_done()
    assert done.problem == version.problem == "scale/1: its files are not the promoted files"
    assert (version.state, version.content_hash) == (VersionState.FAILED, "")


def test_measured_rows_resize_the_queue(loader: HeldLoader, models_root: Path):
    """Rows that the device allows become the batch size; 0 rows mean that nothing was measured."""
    first, second = versions(models_root, 2)
    before = second.queue.max_rows
    for version, rows in ((first, 77), (second, 0)):
        loader.load(version)
        loader.finish(version, rows=rows)
    loader.take_done()
    assert (first.calibrated_rows, first.queue.max_rows) == (77, 77)
    assert (second.calibrated_rows, second.queue.max_rows) == (0, before)


def test_load_now_returns_with_a_ready_version(models_root: Path):
    """The load runs on a thread of its own; the version holds the content of its files."""
    (version,) = versions(models_root, 1)
    loader = Loader("cpu", 1)
    loader.load_now(version)
    assert (version.is_ready, loader.is_busy) == (True, False)
    assert version.content_hash == version.package.manifest().content_hash


@pytest.mark.parametrize(
    ("end", "problem"),
    [
        ("raise ValueError('e' * 500)", r"scale/1.*ValueError: e{100,400}\b"),
        ("raise SystemExit(3)", r"scale/1: entrypoint .* raised SystemExit: 3 \(model.py, line 2, in build\)"),
        ("raise KeyboardInterrupt", r"scale/1: loading failed \(KeyboardInterrupt: \) \(model.py, line 2, in build\)"),
        (OF_ITS_OWN, r"^\(its message cannot be read\)$"),
        ("return lambda inputs: {}", r"scale/1.*\by\b"),
    ],
    ids=["an error", "an exit", "an interrupt", "no text", "no output"],
)
def test_load_now_raises_the_problem_of_the_version(models_root: Path, end: str, problem: str):
    """A package may raise anything, of any length: the error is a ConfigurationError and names the version."""
    folder = write_package(models_root, "scale", f"def build():\n    {end}\n")
    version = ServedVersion(load_package(folder, (models_root,)), InferenceConfig())
    with pytest.raises(ConfigurationError, match=problem) as raised:
        Loader("cpu", 1).load_now(version)
    assert str(raised.value) == version.problem
    assert len(version.problem) <= 400


def test_the_log_has_the_traceback_of_a_failed_load(models_root: Path, caplog: pytest.LogCaptureFixture):
    """The problem is one line; the log has the frames of `build()` beside it. A missing output has no traceback."""
    sources = {
        "helpful": "def build():\n    return {}['k']\n",
        "silent": "def build():\n    return lambda inputs: {}\n",
    }
    for name, source in sources.items():
        folder = write_package(models_root, name, source)
        version = ServedVersion(load_package(folder, (models_root,)), InferenceConfig())
        with pytest.raises(ConfigurationError):
            Loader("cpu", 1).load_now(version)
    traces = [vars(record)["exception"] for record in caplog.records if "exception" in vars(record)]
    (trace,) = [trace for trace in traces if "in build" in trace]
    assert "return {}['k']" in trace
    assert trace.endswith("KeyError: 'k'")
    assert [record.getMessage() for record in caplog.records].count("loading raised an exception") == len(traces)
