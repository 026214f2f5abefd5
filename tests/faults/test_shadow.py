"""F25: a shadow worker is killed, frozen, slow or missing, its candidate crashes, its queue is full."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from penstock import Client
from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.queues import shadow_key
from penstock.registry.shadow import ShadowOrder
from tests.faults.conftest import OpenStage, Stage, Trial
from tests.faults.rounds import seeds
from tests.flow.shadow_stage import ShadowProcess, await_mirror, environ_of, report_of
from tests.packages import write_package
from tests.servers import wait_until

pytestmark = pytest.mark.slow
"""Each starts several programs, and waits for a lease."""
MODEL = "shadowed"
FAR_MS = 10**13
KILLS = 3
NUMBERS = itertools.count(10)
"""No two jobs are equal: a cached answer is not mirrored."""
BATCH = 20
DOUBLE = 'def build():\n    return lambda inputs: {"y": inputs["x"] * 2}\n'
# Each process answers two forwards. One that answers none is loaded again after a hundred times of its load.
CRASHES = """
import os
def build():
    answered = []
    def forward(inputs):
        if inputs["x"].max() > 9:
            answered.append(len(answered))
            if len(answered) > 2:
                os._exit(3)
        return {"y": inputs["x"] * 2}
    return forward
"""
CANDIDATES = {
    "1": DOUBLE,
    "0.1": 'import time\ndef build():\n    return lambda inputs: (time.sleep(0.2), {"y": inputs["x"] * 2})[1]\n',
    "0.2": CRASHES,
    "0.3": 'import time\ndef build():\n    return lambda inputs: (time.sleep(1e6 * (inputs["x"].max() > 9)), '
    '{"y": inputs["x"] * 2})[1]\n',
}
SLOW, CRASHING, BLOCKING = "0.1", "0.2", "0.3"


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """One worker; version 2 serves, the others are candidates."""
    opened = open_stage(model=MODEL)
    for version, source in (CANDIDATES | {"2": DOUBLE}).items():
        write_package(opened.models_root, MODEL, source, version=version)
    opened.start_worker()
    return opened


@contextmanager
def shadow_of(stage: Stage, candidate: str, **caps: int) -> Iterator[tuple[RedisShadow, ShadowOrder]]:
    """A shadow of every job runs inside of the block, and the worker follows it."""
    with closing(RedisShadow.from_url(stage.server.url)) as end:
        before = stage.workers[0].output.read_text().count("answered jobs are mirrored")
        order = ShadowOrder.new(MODEL, candidate, 1.0, until_ms=FAR_MS, canary_pairs=0, **caps)
        assert end.start(order, order.seal()) is None
        await_mirror(stage.workers[0], before + 1)
        try:
            yield end, order
        finally:
            end.stop(MODEL)


@contextmanager
def shadow_worker(stage: Stage, folder: Path) -> Iterator[ShadowProcess]:
    """`penstock shadow run`, killed at the end of the block."""
    process = ShadowProcess(MODEL, environ_of(stage.server, stage.models_root, folder), folder / "shadow")
    try:
        yield process.start()
    finally:
        process.stop()


class Traffic:
    """Jobs in a thread, batch by batch, until the block ends. Each answer is checked."""

    def __init__(self, stage: Stage) -> None:
        self.answered = 0
        self.wrong: list[object] = []
        self._stage = stage
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._submit)

    def __enter__(self) -> Traffic:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _submit(self) -> None:
        with Client(self._stage.server.url) as client:
            while not self._is_over.is_set():
                batch = [float(next(NUMBERS)) for _ in range(BATCH)]
                jobs = client.submit_many(MODEL, [{"x": [[number, 0, 0, 0]]} for number in batch])
                for number, job in zip(batch, jobs, strict=True):
                    try:
                        answer = float(job.result(180)["y"][0, 0])
                    except Exception as error:  # every one is a failed job
                        self.wrong.append(error)
                    else:
                        self.answered += 1
                        if answer != 2 * number:
                            self.wrong.append((number, answer))
                # A shadow worker has the lowest priority: on a busy machine it must catch up all the same.
                self._is_over.wait(0.25)

    def more(self, jobs: int) -> None:
        """Return when so many further jobs are answered."""
        wanted = self.answered + jobs
        wait_until(lambda: self.wrong or self.answered >= wanted, 120, f"{jobs} further jobs are answered")


@pytest.mark.parametrize("seed", seeds())
def test_killed_shadow_workers_lose_and_repeat_no_comparison(stage: Stage, tmp_path: Path, trial: Trial, seed: int):
    """kill -9 in the middle of the work: every mirrored pair is counted once, and each job is answered."""
    environ = environ_of(stage.server, stage.models_root, tmp_path)
    with shadow_of(stage, "1") as (end, _), Traffic(stage) as traffic:
        for kill in range(KILLS):
            with shadow_worker(stage, tmp_path / str(kill)):
                await_more(end)
        traffic.more(BATCH)
        with shadow_worker(stage, tmp_path / "last"):
            traffic.__exit__()
            wait_until(lambda: end.state(MODEL).pairs == 0, 400, "the queue is empty")
            wait_until(lambda: mirrored(end) == traffic.answered, 60, "every job is mirrored")
            wait_until(lambda: compared(end) == mirrored(end), 120, "every pair is counted")
        report = report_of(environ, MODEL)
    assert traffic.wrong == []
    assert report["outcomes"] == {"pass": traffic.answered}
    trial.note(times=KILLS, jobs=traffic.answered)


def await_more(end: RedisShadow) -> None:
    """Return when a further comparison was counted."""
    before = compared(end)
    wait_until(lambda: compared(end) > before, 240, "it compares")


def compared(end: RedisShadow) -> int:
    """Comparisons that were counted."""
    fields = end.state(MODEL, series=0).report
    return sum(int(value) for name, value in fields.items() if name.startswith("n:"))


def mirrored(end: RedisShadow) -> int:
    """Pairs that were appended."""
    return int(end.state(MODEL, series=0).flow.get("mirrored", 0))


def test_a_frozen_shadow_worker_harms_no_job(stage: Stage, tmp_path: Path, trial: Trial):
    """It holds pairs and does nothing. When it goes on, its late settlement counts nothing twice."""
    with (
        shadow_of(stage, "1") as (end, _),
        shadow_worker(stage, tmp_path / "first") as frozen,
        Traffic(stage) as traffic,
    ):
        wait_until(lambda: compared(end) > 0, 120, "it compares")
        frozen.freeze()
        traffic.more(5 * BATCH)
        with shadow_worker(stage, tmp_path / "second"):
            traffic.__exit__()
            wait_until(lambda: end.state(MODEL).pairs == 0, 400, "the other one has compared its pairs, too")
            frozen.thaw()
            wait_until(lambda: compared(end) == mirrored(end), 120, "every pair is counted")
    assert traffic.wrong == []
    trial.note(times=1, jobs=traffic.answered)


@pytest.mark.parametrize("candidate", [SLOW, CRASHING])
def test_a_bad_candidate_harms_no_job(stage: Stage, tmp_path: Path, trial: Trial, candidate: str):
    """The shadow falls behind its traffic; the traffic does not wait."""
    with (
        shadow_of(stage, candidate, max_pairs=200) as (end, _),
        shadow_worker(stage, tmp_path),
        Traffic(stage) as traffic,
    ):
        wait_until(lambda: compared(end) > 0, 120, "it compares")
        if candidate == CRASHING:
            wait_until(lambda: outcomes_of(end).get("crashed"), 240, "a crash is counted")
        traffic.more(10 * BATCH)
        assert end.state(MODEL).pairs <= 200
        outcomes = report_of(environ_of(stage.server, stage.models_root, tmp_path), MODEL)["outcomes"]
    assert ("crashed" in outcomes) == (candidate == CRASHING)
    assert traffic.wrong == []
    trial.note(times=1, jobs=traffic.answered)


def test_a_candidate_that_never_returns_harms_no_job(stage: Stage, tmp_path: Path, trial: Trial):
    """AR-087: while its forward blocks, the version that serves answers every job; the candidate answers nothing."""
    with (
        shadow_of(stage, BLOCKING) as (end, _),
        shadow_worker(stage, tmp_path),
        Traffic(stage) as traffic,
    ):
        wait_until(lambda: in_work(stage), 120, "the candidate has pairs")
        traffic.more(10 * BATCH)
        # At most its limit is over: it was killed, and blocks again.
        assert set(outcomes_of(end)) <= {"timeout"}
        assert in_work(stage)
    assert traffic.wrong == []
    trial.note(times=1, jobs=traffic.answered)


def in_work(stage: Stage) -> int:
    """Pairs that a shadow worker has taken and not settled."""
    with stage.server.client() as client:
        if not client.exists(shadow_key(MODEL)):
            return 0
        return sum(group["pending"] for group in client.xinfo_groups(shadow_key(MODEL)))


def outcomes_of(end: RedisShadow) -> dict[str, int]:
    """Settled pairs by outcome."""
    report = end.state(MODEL, series=0).report
    return {name[2:]: int(value) for name, value in report.items() if name.startswith("n:")}


def test_a_full_queue_harms_no_job(stage: Stage, trial: Trial):
    """There is no shadow worker. The queue stays within its caps, and what is beyond them is counted."""
    with shadow_of(stage, "1", max_pairs=30) as (end, _), Traffic(stage) as traffic:
        traffic.more(5 * BATCH)
        traffic.__exit__()
        told = end.state(MODEL).flow
        wait_until(lambda: mirrored(end) + dropped(end) == traffic.answered, 60, "every job is mirrored or counted")
        assert end.state(MODEL).pairs == 30, told
    assert traffic.wrong == []
    trial.note(times=1, jobs=traffic.answered)


def dropped(end: RedisShadow) -> int:
    """Pairs for which there was no room: refused by the queue, or not even offered to it while it was full."""
    flow = end.state(MODEL, series=0).flow
    return sum(int(flow.get(name, 0)) for name in ("full", "behind"))


def test_a_lost_shadow_queue_harms_no_job(stage: Stage, tmp_path: Path, trial: Trial):
    """Another program deletes it again and again while pairs are taken: jobs and shadow worker go on."""
    with shadow_of(stage, "1") as (end, _), shadow_worker(stage, tmp_path) as shadow, Traffic(stage) as traffic:
        with stage.server.client() as client:
            for _ in range(5):
                await_more(end)
                client.delete(shadow_key(MODEL))
        traffic.more(BATCH)
        assert shadow.is_running
    assert traffic.wrong == []
    trial.note(times=5, jobs=traffic.answered)
