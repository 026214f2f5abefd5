"""Suspects: jobs that were on a model when a process died. Each has its next forward to itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.registry.broker.base import State
from penstock.registry.package import load_package
from penstock.workers.batch_run import BatchRun
from penstock.workers.process.crash_journal import FormInUse
from tests.flow.conftest import amend
from tests.packages import write_double, write_recorder
from tests.servers import wait_until
from tests.workers.doubles import Formed
from tests.workers.stepped import (
    LEASE_S,
    LIMITS,
    SteppedHarness,
)


def crashed(harness: SteppedHarness, model: str, numbers: Sequence[float]) -> list[str]:
    """Jobs during whose forward a worker died; each waits for another worker to take it over."""
    jobs = harness.publish(model, *numbers)
    first = harness.start_worker()
    first.turn(2)
    work = first.begin()
    assert work is not None
    assert [item.job.header.id for item in work.batch.items] == jobs
    harness.crash(first)
    return jobs


def test_suspects_run_one_by_one_and_the_others_together(harness: SteppedHarness, models_root: Path, forward_log: Path):
    """After a crash each of its jobs has a forward to itself; those that only waited run together as ever."""
    write_recorder(models_root, forward_log)
    suspects = crashed(harness, "recorder", [1, 2, 3])
    worker = harness.start_worker()
    worker.drain.leases.tick()
    harness.pass_time(LEASE_S + 1)
    innocent = harness.publish("recorder", *range(10, 15))
    batches = worker.forwards()
    assert sorted(map(len, batches)) == [1, 1, 1, 5]
    assert innocent in batches
    assert [harness.answer(job) for job in (*suspects, *innocent)] == [2 * n for n in (1, 2, 3, *range(10, 15))]


def test_a_suspect_starts_on_an_idle_device_and_nothing_beside_it(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """With two model threads: while anything runs a suspect waits; while it waits or runs nothing else begins."""
    amend(write_recorder(models_root, forward_log), concurrency=2)
    amend(write_recorder(models_root, forward_log, "other"), concurrency=2)
    worker = harness.start_worker()
    (running,) = harness.publish("other", 1)
    worker.turn(2)
    on_a = worker.begin("a")
    assert on_a is not None
    other = harness.start_worker()
    harness.suspend(worker)
    (suspect,) = harness.publish("recorder", 7)
    other.turn(2)
    assert other.begin() is not None
    harness.crash(other)
    harness.workers.append(worker)
    harness.pass_time(LEASE_S + 1)
    harness.publish("other", 2, 3)
    worker.turn(3)
    assert worker.begin("b") is None, "the suspect waits for the device to be idle, and the others behind it"
    worker.end(on_a, "a")
    alone = worker.begin("b")
    assert alone is not None
    assert [item.job.header.id for item in alone.batch.items] == [suspect]
    worker.turn(3)
    assert worker.begin("a") is None, "nothing begins beside the suspect"
    worker.end(alone, "b")
    beside = worker.begin("a")
    assert beside is not None
    worker.end(beside, "a")
    worker.forwards()
    assert (harness.answer(running), harness.answer(suspect)) == (2, 14)


def test_a_suspect_that_has_not_begun_yet_has_the_device_already(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """Between the drain's giving it out and a model thread's taking it nothing else is given out."""
    amend(write_recorder(models_root, forward_log), concurrency=2)
    (suspect,) = crashed(harness, "recorder", [7])
    worker = harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    harness.publish("recorder", 1, 2)
    worker.turn(5)
    waiting = worker.drain.parts.executor.waiting()
    assert [[item.job.header.id for item in work.batch.items] for work in waiting] == [[suspect]]


@pytest.mark.parametrize("max_rows", [16, 2], ids=["at once", "in slices"])
def test_a_suspect_runs_in_the_form_that_its_author_built(harness: SteppedHarness, models_root: Path, max_rows: int):
    """A form that kills its process costs no job: the second forward is the model's own, and no observer hears of it.
    Others go on in the form in use."""
    amend(write_double(models_root), batching={"max_batch_size": max_rows})
    spec = load_package(models_root / "double" / "1").spec
    job = harness._builder.build(spec, {"x": [[float(row), 0, 0, 0] for row in range(1, 5)]})
    harness.broker.publish("double", [job], LIMITS)
    first = harness.start_worker()
    first.turn(2)
    assert first.begin() is not None
    harness.crash(first)
    worker = harness.start_worker()
    heard: list[BatchRun] = []
    version = worker.drain.lifecycle.models["double"].active
    assert version is not None
    version.runtime = formed = Formed(version.runtime)
    version.has_loaded()
    version.observer = SimpleNamespace(observe=heard.append, row_limit=0)
    worker.drain.leases.tick()
    harness.pass_time(LEASE_S + 1)
    assert worker.forward() == [job.job_id]
    assert harness.answer(job.job_id) == 2.0
    assert heard == []
    assert formed.forms.name == "compiled"
    harness.publish("double", 1)
    worker.forward()
    assert worker.journal.forms == [None, FormInUse("double", version.content_hash, "compiled")]


def test_suspects_and_others_take_turns(harness: SteppedHarness, models_root: Path, forward_log: Path):
    """Neither keeps the other from running, however many there are of both."""
    write_recorder(models_root, forward_log)
    write_recorder(models_root, forward_log, "other")
    suspects = set(crashed(harness, "recorder", range(1, 9)))
    worker = harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    for round_ in range(6):
        harness.publish("other", *range(round_ * 100, round_ * 100 + 16))
    kinds = ["suspect" if set(batch) <= suspects else "others" for batch in worker.forwards()]
    assert kinds.count("suspect") == 8
    assert "suspect others suspect others suspect others suspect others" in " ".join(kinds)


def test_a_suspect_shares_no_flight(harness: SteppedHarness, models_root: Path, forward_log: Path):
    """Neither does a suspect follow an equal job, nor an equal job it: the answer of poison is a crash."""
    write_recorder(models_root, forward_log)
    first, second = crashed(harness, "recorder", [7]), harness.publish("recorder", 7)
    worker = harness.start_worker()
    harness.pass_time(LEASE_S + 1)
    batches = worker.forwards()
    assert sorted(batches) == sorted([first, second])
    assert worker.counted("penstock_single_flight") == 0


@pytest.mark.parametrize("fate", ["cancelled", "expired", "lost", "drained", "paused"])
def test_a_suspect_that_waits_may_still_come_to_another_end(
    fate: str, harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """While it waits for its forward it is cancelled, expires, is lost, or goes back; it has not run then."""
    write_recorder(models_root, forward_log)
    write_recorder(models_root, forward_log, "other")
    (job,) = harness.publish("recorder", 7, **({"deadline_s": LEASE_S + 3} if fate == "expired" else {}))
    first = harness.start_worker()
    first.turn(2)
    assert first.begin() is not None
    harness.crash(first)
    worker = harness.start_worker()
    harness.publish("other", 1)
    worker.turn(2)
    busy = worker.begin()
    assert busy is not None
    harness.pass_time(LEASE_S + 1)
    assert [header.id for header in worker.drain.reserved()] == [job]
    if fate == "cancelled":
        harness.broker.cancel(job, "acme", b"")
        harness.pass_time(3)
    elif fate == "expired":
        harness.pass_time(4)
        assert harness.state(job) is State.EXPIRED, "while the device is busy"
    elif fate == "lost":
        assert len(harness.broker.take_over("a thief", "recorder", 0, 10)) == 1
        harness.pass_time(3)
    elif fate == "paused":
        harness.broker.pause("recorder")
        harness.pass_time(2)
        assert not harness.job_record(job).is_claimed
    else:
        worker.drain.ask_to_stop(10.0)
        worker.turn()
    worker.end(busy)
    worker.turn(3)
    ends = {"cancelled": State.CANCELLED, "expired": State.EXPIRED}
    assert harness.state(job) is ends.get(fate, State.QUEUED)
    assert worker.forwards() == []
    assert worker.drain.reserved() == []
    if fate in ("drained", "paused"):
        assert not harness.job_record(job).is_claimed
        harness.broker.resume("recorder")
        harness.workers[:] = [harness.start_worker()]
        harness.pass_time(1)
        assert harness.workers[0].forwards() == [[job]]
        assert harness.answer(job) == 14
    elif fate != "lost":
        assert worker.drain.health.readiness[1]["in_memory"] == 0


def test_a_suspect_whose_version_was_unloaded_meanwhile_has_it_loaded_again(harness: SteppedHarness, models_root: Path):
    """A version with suspects counts as idle, so memory pressure may unload it: the suspect brings it back."""
    write_double(models_root)
    write_double(models_root, "other")
    (job,) = crashed(harness, "double", [7])
    worker = harness.start_worker()
    harness.publish("other", 1)
    worker.turn(2)
    busy = worker.begin()
    assert busy is not None
    worker.drain.leases.tick()
    harness.pass_time(LEASE_S + 1)
    assert [header.id for header in worker.drain.reserved()] == [job]
    version = worker.drain.lifecycle.models["double"].active
    assert version is not None
    worker.drain.lifecycle._unload(version)
    worker.end(busy)

    def is_answered() -> bool:
        worker.forwards()
        return harness.state(job) is State.COMPLETED

    wait_until(is_answered, 30, "the suspect is answered")
