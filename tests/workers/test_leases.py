"""A worker in touch with its broker: it renews what it has and takes over from the dead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from penstock.registry.broker.base import Delivery, Held, Renewal, State
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import MAX_JOB_BYTES
from penstock.registry.errors import BrokerUnavailable
from penstock.workers.credit import TakeOverRoom
from penstock.workers.leases import LeasedJobs, LeaseKeeper
from penstock.workers.versions.version import VersionState
from tests.conformance.jobs import claim, held, publish
from tests.packages import write_double
from tests.workers.doubles import job_of
from tests.workers.stepped import (
    open_harness,
)


def test_a_worker_that_loads_what_answers_stays_in_touch(models_root: Path):
    """With a lease of a second: it takes over from the dead as soon as it can serve, not a lease after that."""
    write_double(models_root)
    for harness in open_harness(models_root, queue={"lease_s": 1.0}):
        harness.start_worker()
        harness.pass_time(2.0)
        (job,) = harness.publish("double", 3)
        harness.workers[0].turn(2)
        dead = harness.workers[0]
        worker = harness.start_worker()
        harness.crash(dead)
        version = worker.drain.lifecycle.models["double"].active
        assert version is not None
        version.state = VersionState.LOADING
        harness.pass_time(3.0)
        assert harness.state(job) is State.QUEUED
        version.state = VersionState.READY
        harness.pass_time(0.5)
        assert worker.forward() == [job]


def test_leased_jobs_count_their_bytes_by_model():
    """Once each, also when one is taken or dropped twice."""
    leased = LeasedJobs()
    jobs = [job_of(model=model) for model in ("a", "a", "b")]
    for job, size in zip(jobs, (10, 20, 300), strict=True):
        job.delivery = structs.replace(job.delivery, sealed=bytes(size))
    leased.take(jobs)
    leased.take(jobs[:1])
    assert (leased.sizes, leased.nbytes) == ({"a": 30, "b": 300}, 330)
    for _ in range(2):
        leased.drop(jobs[1:])
    assert (leased.sizes, leased.nbytes) == ({"a": 10, "b": 0}, 10)


class _Counting(MemoryBroker):
    """Notes the count of each take-over and each adoption."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.counts: list[int] = []

    def take_over(self, consumer: str, slot: str, lease_ms: int, count: int) -> list[Delivery]:
        self.counts.append(count)
        return super().take_over(consumer, slot, lease_ms, count)

    def adopt(self, consumer: str, slot: str, versions: Any, count: int) -> list[Delivery]:
        self.counts.append(count)
        return super().adopt(consumer, slot, versions, count)


def _taken_over(jobs: int, room: TakeOverRoom, version: str = "") -> tuple[list[int], int]:
    """How many jobs each call asked for, and how many came: of `jobs` small ones that a leaving worker released."""
    broker = _Counting(lambda: 1000.0)
    found: list[Delivery] = []
    keeper = LeaseKeeper(
        broker,
        "w2",
        lambda: [] if version else ["double"],
        LeasedJobs(),
        lease_s=1.0,
        offered=lambda: {"double": {version: 1000}} if version else {},
        room=lambda: room,
        on_update=lambda update: found.extend(update.taken_over),
        look=lambda: None,
        report=lambda: None,
        clock=lambda: 1000.0,
    )
    publish(broker, "double", jobs)
    broker.release("w", [held(delivery) for delivery in claim(broker, "w", "double")], version=version)
    keeper.tick()
    return broker.counts, len(found)


@pytest.mark.parametrize("version", ["", "2"])
def test_small_jobs_are_taken_over_at_once_though_each_might_be_the_largest(version: str):
    """One call asks for what surely fits; the next ones follow while they find as many. Handed-over jobs alike."""
    assert _taken_over(10, TakeOverRoom(100, 4 * MAX_JOB_BYTES), version) == ([4, 3, 3, 3], 10)
    assert _taken_over(10, TakeOverRoom(6, 4 * MAX_JOB_BYTES), version) == ([4, 2], 6)
    assert _taken_over(10, TakeOverRoom(100, 1), version) == ([1], 1)
    assert _taken_over(10, TakeOverRoom(0, 0), version) == ([], 0)


def test_steps_that_are_due_soon_are_done_in_one_turn():
    """The lease thread wakes up for its searches; it renews and reports on the way, and renews nothing for none."""
    now: list[float] = [1000.0]
    done: list[str] = []
    broker, leased = _Renewing(lambda: now[0], done), LeasedJobs()
    keeper = LeaseKeeper(
        broker,
        "w",
        list,
        leased,
        lease_s=1.0,
        offered=dict,
        room=lambda: TakeOverRoom(0, 0),
        on_update=lambda _: None,
        look=lambda: done.append("look"),
        report=lambda: done.append("report"),
        clock=lambda: now[0],
    )
    assert keeper.tick() == 0.25
    assert done == ["look", "report"]
    leased.take([job_of()])
    done.clear()
    for _ in range(4):
        now[0] += 0.25
        assert keeper.tick() == 0.25
    assert done == [*("renew", "look"), *("renew", "look"), *("renew", "look"), *("renew", "look", "report")]


def test_a_broker_that_is_away_fills_no_log(caplog: pytest.LogCaptureFixture):
    """One line at once, and one every ten seconds; the next time that it is away is told at once, too."""
    now: list[float] = [1000.0]
    is_away = True

    def report() -> None:
        if is_away:
            raise BrokerUnavailable("The broker does not answer")

    keeper = LeaseKeeper(
        MemoryBroker(lambda: now[0]),
        "w",
        list,
        LeasedJobs(),
        lease_s=1.0,
        offered=dict,
        room=lambda: TakeOverRoom(0, 0),
        on_update=lambda _: None,
        look=lambda: None,
        report=report,
        clock=lambda: now[0],
    )

    def lines_in(seconds: float) -> int:
        caplog.clear()
        until = now[0] + seconds
        while now[0] < until:
            now[0] += keeper.tick()
        return len([record for record in caplog.records if record.message.startswith("leases are not renewed")])

    assert lines_in(9) == 1
    assert lines_in(30) == 3
    is_away = False
    assert lines_in(3) == 0
    is_away = True
    assert lines_in(3) == 1


class _Renewing(MemoryBroker):
    """Notes each renewal."""

    def __init__(self, clock: Callable[[], float], done: list[str]) -> None:
        super().__init__(clock)
        self._done = done

    def renew(self, consumer: str, held: Sequence[Held]) -> Renewal:
        self._done.append("renew")
        return super().renew(consumer, held)
