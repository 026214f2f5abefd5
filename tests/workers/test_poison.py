"""Poison: a job that ends the process again and again becomes a dead letter, and nothing else counts."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.broker.base import State
from tests.packages import write_package, write_recorder
from tests.workers.stepped import (
    LEASE_S,
    SteppedHarness,
    open_harness,
)


def test_the_third_crash_makes_a_dead_letter(harness: SteppedHarness, models_root: Path, forward_log: Path):
    """Alone at every further crash; after the third it is not run again: its bytes and the reason are kept, its
    client is told, the monitor sees a failure, and its neighbours have their answers.
    """
    write_recorder(models_root, forward_log)
    neighbours = harness.publish("recorder", 1, 2)
    (poison,) = harness.publish("recorder", 666)
    crashes = 0
    while crashes < 3:
        worker = harness.start_worker()
        harness.pass_time(LEASE_S + 1)
        worker.turn(2)
        work = worker.begin()
        assert work is not None
        jobs = [item.job.header.id for item in work.batch.items]
        if poison in jobs:
            assert jobs == ([*neighbours, poison] if crashes == 0 else [poison])
            harness.crash(worker)
            crashes += 1
        else:
            worker.end(work)
            harness.suspend(worker)
            worker.drain.ask_to_stop(0.0)
            worker.turn(2)
    last = harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    assert all(poison not in batch for batch in last.forwards())
    assert (harness.state(poison), harness.answer(poison)) == (State.DEAD, "DeadLettered")
    (letter,) = harness.broker.dead_letters("recorder")
    assert letter.reason == "Poison: 3 worker processes died, or hung and were killed, while it ran"
    assert (letter.job_id, letter.crashes) == (poison, 3)
    kept = harness.broker.read_dead_letter("recorder", letter.entry)
    assert kept is not None
    assert poison.encode() in kept.sealed
    assert (poison, State.DEAD, "DeadLettered") in last.notes.ends
    assert last.counted("penstock_dead_lettered") == 1
    assert [harness.answer(job) for job in neighbours] == [2, 4]


@pytest.mark.parametrize("max_crashes", [1, 2])
def test_the_setting_says_after_how_many_crashes(models_root: Path, forward_log: Path, max_crashes: int):
    """queue.max_crashes: with so many, the job runs no more."""
    write_recorder(models_root, forward_log)
    for harness in open_harness(models_root, queue={"lease_s": LEASE_S, "max_crashes": max_crashes}):
        (poison,) = harness.publish("recorder", 666)
        for _ in range(max_crashes):
            worker = harness.start_worker()
            harness.pass_time(LEASE_S + 1)
            worker.turn(2)
            assert worker.begin() is not None
            harness.crash(worker)
        last = harness.start_worker()
        harness.pass_time(LEASE_S + 1)
        assert last.forwards() == []
        assert (harness.state(poison), harness.answer(poison)) == (State.DEAD, "DeadLettered")


def test_drains_releases_and_lapsed_leases_make_no_job_a_suspect(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """The jobs of a worker that was killed while it drained, and of one that froze, are no suspects."""
    write_recorder(models_root, forward_log)
    jobs = harness.publish("recorder", 1, 2, 3)
    told = harness.start_worker()
    told.turn(2)
    assert told.begin() is not None
    told.drain.ask_to_stop(10.0)
    harness.crash(told)
    frozen = harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    frozen.turn(2)
    assert frozen.begin() is not None
    harness.suspend(frozen)
    worker = harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    assert worker.forwards() == [jobs]


def test_a_job_that_ends_its_instance_is_run_alone_and_becomes_poison(harness: SteppedHarness, models_root: Path):
    """The worker lives on: its neighbours answer after one more forward, the third death makes a dead letter."""
    source = """
    import itertools
    from penstock.workers.runtime.base import InstanceLost
    deaths = itertools.count()
    def build():
        def forward(inputs):
            if (inputs["x"][:, 0] == 666).any():
                raise InstanceLost("an instance was ended by SIGKILL", f"process-{next(deaths)}")
            return {"y": inputs["x"] * 2}
        return forward
    """
    write_package(models_root, "fragile", source)
    neighbours = harness.publish("fragile", 1, 2)
    (poison,) = harness.publish("fragile", 666)
    worker = harness.start_worker()
    batches = []
    for _ in range(20):
        harness.pass_time(1.0)
        batches += worker.forwards()
    assert batches[0] == [*neighbours, poison]
    assert sorted(batches[1:]) == sorted([[neighbours[0]], [neighbours[1]], [poison], [poison]])
    assert [harness.answer(job) for job in neighbours] == [2, 4]
    assert (harness.state(poison), harness.answer(poison)) == (State.DEAD, "DeadLettered")
    assert worker.drain.health.unhealthy_reason() is None
    assert worker.counted("penstock_dead_lettered") == 1
