"""`penstock top`: figures from the difference of two snapshots, a screen in a terminal, lines elsewhere."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import closing, contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from penstock.compose.views.top import Snapshot, compare, draw, line, take_snapshot
from penstock.registry.broker.base import Depth
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import Priority
from tests.compose.conftest import penstock
from tests.packages import write_double
from tests.servers import ROOT, RedisServer, wait_until

_ENTER, _LEAVE = b"\x1b[?1049h", b"\x1b[?1049l"
"""The sequences that switch a terminal to another screen, and back."""


def _snapshot(at: float, committed: int, load: dict[str, float] | None, *, pid: int = 1, waiting: int = 0) -> Snapshot:
    depths = [Depth("m", priority, 0, 0, 0.0) for priority in Priority]
    depths[Priority.NORMAL] = Depth("m", Priority.NORMAL, waiting + 3, 3, 1.5 if waiting else 0.0)
    report = {"name": "w", "pid": pid, "device": "cpu", "ready": True, "models": {"m": "1"}, "in_memory": 3}
    report |= {"in_memory_bytes": 2_500_000, "process_bytes": 812_000_000, "device_bytes": None}
    return Snapshot(at, {"m": depths}, {"m": committed}, frozenset(), [report], {("w", pid, "m"): load} if load else {})


def _load(jobs: int, batches: int, rows: int, queue_s: float, compute_s: float) -> dict[str, float]:
    sums = {"jobs": jobs, "batches": batches, "rows": rows}
    return {**sums, "queue_s": queue_s, "batch_s": 0.0, "compute_s": compute_s, "commit_s": 0.001 * batches}


def test_figures_are_those_of_the_interval():
    """Work before the first snapshot is not counted; times are means per job and per batch."""
    before = _snapshot(10.0, 1000, _load(1000, 500, 1000, 99.0, 99.0))
    after = _snapshot(12.0, 1600, _load(1600, 540, 1640, 99.6, 99.2), waiting=7)
    state = compare(before, after)
    (model,) = state["models"]
    assert model == {
        "model": "m",
        "paused": False,
        "jobs_per_s": 300.0,
        "waiting": 7,
        "running": 3,
        "oldest_waiting_s": 1.5,
        "rows_per_batch": 16.0,
        "latency_ms": {"queue": 1.0, "batch": 0.0, "compute": 5.0, "commit": 1.0},
    }
    assert [(worker["jobs_per_s"], worker["rows_per_batch"]) for worker in state["workers"]] == [(300.0, 16.0)]
    assert [(worker["in_memory"], worker["in_memory_bytes"]) for worker in state["workers"]] == [(3, 2_500_000)]
    assert [(worker["process_bytes"], worker["device_bytes"]) for worker in state["workers"]] == [(812_000_000, None)]
    shown = line(state)
    assert "300 jobs/s  waiting 7  running 3  oldest 1.5 s" in shown
    assert "m: 16.0 rows/batch, queue 1.0 batch 0.0 compute 5.0 commit 1.0 ms  workers 1 of 1 ready" in shown
    assert "\n" not in shown


def test_a_worker_has_its_memory_and_its_cache_hits():
    """ES-050: bytes of the process and of its GPUs, and the share of answers that the cache had in the interval."""
    before = _snapshot(10.0, 100, {**_load(100, 100, 100, 0.0, 0.0), "cached": 500.0})
    after = _snapshot(12.0, 160, {**_load(130, 120, 130, 0.0, 0.0), "cached": 590.0})
    (report,) = after.reports
    report["device_bytes"] = 9_000_000_000
    state = compare(before, after)
    assert state["workers"][0]["cached"] == 0.75
    assert re.search(r"w +cpu +ready +60\.0 +1\.5 +3 +2\.5 +812\+9,000 +75% +m/1", "\n".join(_drawn(state, 40, 120)))
    (idle,) = compare(after, after)["workers"]
    assert idle["cached"] is None


def test_a_restarted_worker_starts_at_zero():
    """The sums of a restarted worker start at 0: no rate is negative, and no job is counted twice."""
    before = _snapshot(10.0, 1000, _load(1000, 500, 1000, 99.0, 99.0))
    after = _snapshot(11.0, 1010, _load(10, 5, 10, 0.1, 0.1), pid=2)
    (worker,) = compare(before, after)["workers"]
    assert (worker["jobs_per_s"], worker["rows_per_batch"]) == (10.0, 2.0)


def test_unreported_figures_are_unknown():
    """Without the workers' sums the throughput is known, and the other figures are None instead of 0."""
    state = compare(_snapshot(10.0, 100, None), _snapshot(11.0, 150, None))
    (model,) = state["models"]
    assert (model["jobs_per_s"], model["rows_per_batch"]) == (50.0, None)
    assert model["latency_ms"] == {"queue": None, "batch": None, "compute": None, "commit": None}
    assert state["workers"][0]["jobs_per_s"] is None
    json.dumps(state)


def _engine(**changes: Any) -> dict[str, Any]:
    counts = {"generated_tokens": 1000, "steps": 100, "rows": 300, "prefix_queried": 400, "prefix_found": 100}
    state = {"waiting": 2, "running": 4, "pages_used": 30, "pages": 244, "step_s": 0.0125, "predicted_wait_s": 3.25}
    return {"model": "writer", "version": "1", **counts, **state, **changes}


def _with_engines(at: float, *engines: dict[str, Any]) -> Snapshot:
    snapshot = _snapshot(at, 0, None)
    return snapshot._replace(reports=[{**snapshot.reports[0], "engines": list(engines)}])


LATER = {"generated_tokens": 1900, "steps": 150, "rows": 525, "prefix_queried": 600, "prefix_found": 250}


def test_engines_have_the_figures_of_the_interval():
    """Rates and means are of the interval; what waits, runs and is used is that of the end."""
    state = compare(_with_engines(10.0, _engine()), _with_engines(12.0, _engine(**LATER)))
    (engine,) = state["engines"]
    assert engine == {
        "model": "writer",
        "version": "1",
        "worker": "w",
        "tokens_per_s": 450.0,
        "waiting": 2,
        "running": 4,
        "rows_per_step": 4.5,
        "step_ms": 12.5,
        "pages_used": 30,
        "pages": 244,
        "prefix_found": 0.75,
        "predicted_wait_s": 3.25,
    }
    assert "writer: 450 tokens/s, 4 run, 2 wait, pages 30/244, prefix 75%, predicted wait 3.2 s" in line(state)
    shown = "\n".join(_drawn(state, 40, 120))
    assert re.search(r"writer/1 +450 +2 +4 +4\.5 +12\.5 +30/244 +75% +3\.2 +w", shown)


def test_an_engine_that_was_loaded_again_starts_at_zero():
    """Its counts are smaller than before; what it does not know yet is no figure."""
    again = _engine(generated_tokens=50, steps=0, rows=0, prefix_queried=0, step_s=None, predicted_wait_s=None)
    state = compare(_with_engines(10.0, _engine()), _with_engines(11.0, again))
    (engine,) = state["engines"]
    assert engine["tokens_per_s"] == 50.0
    assert [engine[name] for name in ("rows_per_step", "step_ms", "prefix_found", "predicted_wait_s")] == [None] * 4
    json.dumps(state)
    assert "predicted wait - s" in line(state)


def test_without_an_engine_there_is_no_table_of_them():
    """A screen of other models has its lines for them."""
    state = compare(_snapshot(10.0, 0, None), _snapshot(11.0, 0, None))
    assert state["engines"] == []
    assert not any("tokens/s" in each for each in _drawn(state, 40, 120))


def test_a_new_model_starts_at_zero():
    """Between two snapshots a model may be registered, and the broker may be emptied."""
    empty = Snapshot(10.0, {}, {}, frozenset(), [], {})
    assert compare(empty, _snapshot(11.0, 5000, None))["models"][0]["jobs_per_s"] == 0.0
    assert compare(_snapshot(10.0, 5000, None), _snapshot(11.0, 0, None))["models"][0]["jobs_per_s"] == 0.0


def _busy_and_idle(models: int, workers: int, engines: int = 0) -> dict[str, Any]:
    """Many models, all but the last one idle, and workers, the last one not ready, the first with engines."""
    depths = {
        f"m{each:03}": [Depth(f"m{each:03}", priority, int(each == models - 1), 0, 0.0) for priority in Priority]
        for each in range(models)
    }
    serves = dict.fromkeys(depths, "1")
    reports = [
        {"name": f"w{each:03}", "pid": each, "device": "cpu", "ready": each < workers - 1, "models": serves}
        for each in range(workers)
    ]
    made = [_engine(model=f"e{each:03}", running=int(each == engines - 1)) for each in range(engines)]
    reports[:1] = [{**report, "engines": made} for report in reports[:1]]
    snapshot = Snapshot(10.0, depths, dict.fromkeys(depths, 0), frozenset(), reports, {})
    return compare(snapshot, snapshot)


def _drawn(state: dict[str, Any], height: int, width: int) -> list[str]:
    with StringIO() as output:
        Console(file=output, width=width, height=height, color_system=None).print(draw(state, height))
        return output.getvalue().splitlines()


@pytest.mark.parametrize(("models", "workers"), [(0, 0), (1, 1), (40, 1), (3, 40), (40, 40)])
@pytest.mark.parametrize(
    ("engines", "height", "width"), [(0, 16, 100), (0, 24, 80), (0, 50, 160), (20, 24, 80), (20, 50, 160)]
)
def test_a_small_screen_shows_the_important_rows(models: int, workers: int, engines: int, height: int, width: int):
    """Models with jobs and workers that are not ready come first, and every table has rows on the screen."""
    state = _busy_and_idle(models, workers, engines)
    shown = _drawn(state, height, width)
    assert len(shown) + 2 <= height
    names = [each.split()[0] for each in shown if each]
    for count, letter in ((models, "m"), (workers, "w"), (engines if workers else 0, "e")):
        rows = [each.partition("/")[0] for each in names if re.fullmatch(rf"{letter}\d+(/1)?", each)]
        assert (f"{letter}{count - 1:03}" in rows) == (count > 0)
        left_out = [int(each.split()[1]) for each in shown if each.startswith("and ")]
        assert len(set(rows)) == count or count - len(set(rows)) in left_out
    assert len(_drawn(state, 200, width)) >= models + workers


def test_running_stack_is_measured(home: Path):
    """A real worker has throughput, batch sizes and a split of the latency, in a table and as JSON."""
    with closing(RedisStreams.from_url(_redis_url(home))) as broker:
        before = take_snapshot(broker)
        # The last job gets the cached result of the one before it, without a batch.
        for number in (7.5, 8.5, 8.5):
            assert penstock(home, "submit", "double", "-i", f"x=[[{number}, 0, 0, 0]]", "--wait").exit_code == 0
        state = wait_until(
            lambda: _counted(compare(before, take_snapshot(broker)), 3), 5, "the worker reports three jobs"
        )
    (model,) = state["models"]
    (worker,) = state["workers"]
    assert worker["process_bytes"] > 1e6
    assert worker["cached"] == pytest.approx(1 / 3, abs=1e-3)
    assert model["rows_per_batch"] == 1.0
    assert model["jobs_per_s"] == state["workers"][0]["jobs_per_s"]
    assert model["latency_ms"]["compute"] > 0
    assert model["latency_ms"]["commit"] > 0
    once = json.loads(penstock(home, "top", "--once", "--interval", "0.1", "--json").stdout)
    assert [each["model"] for each in once["models"]] == ["double"]
    shown = penstock(home, "top", "--once", "--interval", "0.1").stdout
    assert "double" in shown
    assert "ready" in shown
    assert "\x1b" not in shown


def _counted(state: dict[str, Any], jobs: int) -> dict[str, Any]:
    (worker,) = state["workers"]
    counted = round((worker["jobs_per_s"] or 0) * state["interval_s"])
    return state if counted == jobs else {}


def _redis_url(home: Path) -> str:
    return str(json.loads((home / "stack.json").read_text())["redis_url"])


@pytest.fixture
def environ(redis_server: RedisServer, tmp_path: Path, slot: str) -> dict[str, str]:
    """The environment of a shell whose broker has exactly one model, so that it is always on the screen."""
    there = {"PENSTOCK_REDIS_URL": redis_server.url, "PENSTOCK_HOME": str(tmp_path)}
    assert penstock(tmp_path, "models", "register", str(write_double(tmp_path, slot)), **there).exit_code == 0
    return {**there, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PATH": os.environ["PATH"]}


_TOP = [sys.executable, "-c", "from penstock.compose.cli import main; main()", "top", "--interval"]


@pytest.mark.parametrize("as_json", [False, True], ids=["lines", "json"])
def test_pipe_gets_one_line_per_interval(environ: dict[str, str], as_json: bool):
    """A pipe gets lines without colours, until the command is interrupted."""
    arguments = [*_TOP, "0.2", *(["--json"] if as_json else [])]
    with subprocess.Popen(arguments, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0
    if as_json:
        assert all(json.loads(each)["interval_s"] >= 0.2 for each in lines)
    else:
        assert all("jobs/s" in each and "\x1b" not in each for each in lines)


def test_lines_continue_after_an_outage(redis_server: RedisServer, tmp_path: Path):
    """An outage is one line on stderr per interval; afterwards the lines continue."""
    environ = {"PENSTOCK_REDIS_URL": redis_server.url, "PENSTOCK_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [*_TOP, "0.2"], env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert "jobs/s" in process.stdout.readline()
        redis_server.kill()
        assert process.stderr.readline().startswith("The broker did not answer")
        redis_server.start()
        assert "jobs/s" in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(180) == 0


class _Terminal:
    """`penstock top` in a pseudo-terminal."""

    def __init__(self, environ: dict[str, str], interval: str) -> None:
        self.master, slave = pty.openpty()
        self.resize(30, 100)
        self.mode = termios.tcgetattr(slave)
        self.slave = slave
        self.output = b""
        self.process = subprocess.Popen(
            [*_TOP, interval],
            env=environ,
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )

    def resize(self, rows: int, columns: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def shows(self, text: bytes) -> bool:
        while select.select([self.master], [], [], 0.01)[0]:
            self.output += os.read(self.master, 65536)
        return text in self.output

    def press(self, key: bytes) -> None:
        os.write(self.master, key)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextmanager
def _on_terminal(environ: dict[str, str], interval: str = "0.2") -> Iterator[_Terminal]:
    terminal = _Terminal(environ, interval)
    try:
        yield terminal
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.master)
        os.close(terminal.slave)


@pytest.mark.parametrize("end", [b"q", b"\x03", signal.SIGTERM, signal.SIGINT], ids=["q", "Ctrl-C", "TERM", "INT"])
def test_screen_ends_cleanly(environ: dict[str, str], slot: str, end: bytes | signal.Signals):
    """The screen is a separate one, and every end of the command restores the terminal."""
    with _on_terminal(environ) as terminal:
        wait_until(lambda: terminal.shows(slot.encode()), 30, "the model is on the screen")
        assert terminal.output.startswith(_ENTER)
        if isinstance(end, bytes):
            terminal.press(end)
        else:
            terminal.process.send_signal(end)
        status = terminal.process.wait(180)
        wait_until(lambda: terminal.shows(_LEAVE), 5, "the other screen is left")
        assert status == (128 + signal.SIGTERM if end is signal.SIGTERM else 0)
        assert termios.tcgetattr(terminal.slave) == terminal.mode
        assert b"Traceback" not in terminal.output


def test_the_screen_follows_the_size_of_the_terminal(environ: dict[str, str], slot: str):
    """After a change of its size the screen is drawn at once, and no line is longer than the terminal is wide."""
    with _on_terminal(environ, interval="60") as terminal:
        wait_until(lambda: terminal.shows(slot.encode()), 30, "the model is on the screen")
        terminal.resize(12, 40)
        terminal.process.send_signal(signal.SIGWINCH)
        drawn = len(terminal.output)
        wait_until(lambda: terminal.shows(b"") and len(terminal.output) > drawn, 5, "it is drawn again")
        wait_until(lambda: _widest(terminal) <= 40, 5, "it is as wide as the terminal")
        terminal.press(b"q")
        assert terminal.process.wait(180) == 0


def _widest(terminal: _Terminal) -> int:
    """The longest line of the last frame."""
    terminal.shows(b"")
    frame = terminal.output.rpartition(b"\x1b[H")[2]
    lines = [_without_colours(each) for each in frame.decode(errors="ignore").split("\n")]
    return max(len(each.rstrip("\r")) for each in lines) if len(lines) > 3 else 999


def _without_colours(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
