"""The claimer: how many jobs a worker asks for, when it asks, and when it waits instead."""

from __future__ import annotations

import os
import select
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry.broker.base import ALL_BANDS, Commit, Delivery, Limits, Publication, State
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import MAX_JOB_BYTES
from penstock.registry.queues import Priority, new_job_id
from penstock.workers.claims import AgeingReserve, Claimer, WakeUp
from penstock.workers.leases import AGEING_SHARE, LeasedJobs
from penstock.workers.versions.queue import VersionQueue
from penstock.workers.versions.version import ServedModel, VersionState
from tests.workers.doubles import job_of, ready_version

ROOMY = Limits(1000, 0, 60_000)
CAPACITY = 4
"""Jobs that each model of these tests takes: two batches of two rows."""


class Noting(MemoryBroker):
    """A broker that notes each blocking claim: its slots and its count, and the bands of those claimed in part."""

    def __init__(self) -> None:
        super().__init__(lambda: 1000.0)
        self.armed: list[tuple[list[str], int]] = []
        self.bands: list[dict[str, int]] = []

    def arm(
        self, consumer: str, slots: Sequence[str], count: int, block_ms: int, bands: Mapping[str, int] = ALL_BANDS
    ) -> None:
        self.armed.append((list(slots), count))
        self.bands.append(dict(bands))
        super().arm(consumer, slots, count, block_ms, bands)


class Harness:
    """A claimer for some models with room for CAPACITY jobs each, and a broker with its clock."""

    def __init__(self, *models: str, most_jobs: int = 100, most_bytes: int = 1 << 28) -> None:
        self.now = 1000.0
        self.broker = Noting()
        self.models = {name: ServedModel(name, ready_version(max_rows=2, name=name)) for name in models or ("double",)}
        self.leased = LeasedJobs()
        self.checkpoints: list[str] = []
        self.claimer = Claimer(
            self.broker,
            "worker-1",
            self.models,
            self.leased,
            WakeUp(),
            most_jobs=most_jobs,
            most_bytes=most_bytes,
            ageing_ms=1000,
            result_ttl_ms=60_000,
            checkpoint=self.checkpoints.append,
            clock=lambda: self.now,
        )

    def publish(
        self, model: str, count: int, *, sealed: bytes = b"a job", priority: Priority = Priority.NORMAL
    ) -> None:
        jobs = [Publication(new_job_id(model), priority, sealed, "acme") for _ in range(count)]
        self.broker.publish(model, jobs, ROOMY)

    def hold(self, model: str, nbytes: int) -> None:
        """One job of the model and of this size is in memory."""
        job = job_of(model=model)
        job.delivery = structs.replace(job.delivery, sealed=bytes(nbytes))
        self.leased.take([job])

    def bytes_wanted(self) -> dict[str, int]:
        """The credit in bytes of each model that is asked for now."""
        return {claim.slot: claim.credit_bytes for claim in self.claimer.wanted()}

    def wanted(self) -> dict[str, int]:
        """The credit of each model that is asked for now."""
        return {claim.slot: claim.credit for claim in self.claimer.wanted()}

    def claim(self) -> list[Delivery]:
        return self.claimer.exchange([], self.claimer.wanted())[1]

    def is_armed(self) -> bool:
        return self.claimer.is_armed

    def take(self, model: str, count: int, priority: Priority = Priority.NORMAL) -> None:
        """So many jobs of the model are in memory."""
        jobs = [job_of(model=model, priority=priority) for _ in range(count)]
        self.leased.take(jobs)
        for job in jobs:
            self._queue(model).reserve(job)

    def end(self, model: str, count: int) -> None:
        """So many of them are no longer."""
        jobs = [job for job in self.leased._held.values() if job.header.model == model][:count]
        self.leased.drop(jobs)
        self._queue(model).release_all(jobs)

    def seat(self, model: str, seats: int) -> None:
        """The model has an engine, with so many seats and room for as many urgent jobs."""
        queue = self._queue(model)
        queue.follow(replace(queue.policy, seats=seats, concurrency=2 * seats))

    def _queue(self, model: str) -> VersionQueue:
        active = self.models[model].active
        assert active is not None
        return active.queue


@given(st.lists(st.integers(min_value=1, max_value=200), min_size=1, max_size=40))
def test_the_reserve_is_its_share_over_any_claims(credits_: list[int]):
    """No claim keeps more than it asks for, and together they are less than one job below the share."""
    reserve = AgeingReserve()
    reserves = [reserve.of(credit) for credit in credits_]
    assert all(0 <= reserved <= credit for reserved, credit in zip(reserves, credits_, strict=True))
    assert 0 <= sum(credits_) * AGEING_SHARE - sum(reserves) < 1


def test_each_model_is_asked_for_its_room_within_that_of_the_worker():
    """A full model is left out, the others take in turn, and all get no more than the worker may hold."""
    harness = Harness("a", "b", "c", most_jobs=7)
    assert harness.wanted() == {"a": 4, "b": 3}
    harness.take("a", CAPACITY)
    assert harness.wanted() == {"b": 3}
    harness.take("b", 1)
    assert harness.wanted() == {"c": 2}
    harness.take("b", 2)
    assert harness.wanted() == {}


def test_it_asks_until_every_queue_was_seen_empty():
    """A queue that had as many jobs as were asked for may have more, and then all queues are asked again."""
    harness = Harness("a", "b")
    harness.publish("a", CAPACITY)
    assert len(harness.claim()) == CAPACITY
    assert harness.wanted() == {"a": CAPACITY, "b": CAPACITY}
    assert harness.claim() == []
    assert harness.wanted() == {}


def test_a_model_without_room_keeps_the_worker_asking():
    """Its queue may hold more jobs than it could take, so a blocking claim would answer at once."""
    harness = Harness("a", "b")
    harness.claim()
    harness.take("a", CAPACITY)
    harness.claimer.arm()
    assert not harness.is_armed()
    assert harness.wanted() == {"b": CAPACITY}


def test_a_model_whose_version_is_not_here_is_neither_asked_for_nor_waited_for():
    """While its active version loads or has failed, other workers claim its jobs."""
    harness = Harness("a", "b")
    version = harness.models["b"].active
    assert version is not None
    version.state = VersionState.LOADING
    assert harness.wanted() == {"a": CAPACITY}
    harness.claim()
    harness.claimer.arm()
    assert [slots for slots, _ in harness.broker.armed] == [["a"]]


def test_a_blocking_claim_is_left_only_after_all_queues_were_seen_empty():
    """Then nothing is asked for until it has answered, and its jobs end the wait."""
    harness = Harness("a", "b")
    harness.claimer.arm()
    assert not harness.is_armed()
    harness.claim()
    harness.claimer.arm()
    harness.claimer.arm()
    assert harness.is_armed()
    assert len(harness.broker.armed) == 1
    assert harness.wanted() == {}
    harness.publish("b", 1)
    assert [delivery.slot for delivery in harness.claimer.wait(60.0)] == ["b"]
    assert not harness.is_armed()


def test_a_model_with_much_room_leaves_the_others_theirs():
    """Models take of the worker's room in turn: each is asked for, and so each can be seen empty."""
    harness = Harness("a", "b", "c", most_jobs=CAPACITY)
    for _ in range(3):
        harness.claim()
    harness.claimer.arm()
    assert harness.is_armed()
    harness = Harness("a", "b", most_jobs=CAPACITY)
    harness.publish("a", 100)
    harness.publish("b", 1)
    assert {delivery.slot for _ in range(2) for delivery in harness.claim()} == {"a", "b"}


def test_a_blocking_claim_stays_within_the_room_of_the_worker():
    """Its count holds for each queue of each model; it is at least one, and none is left without any room."""
    for most_jobs, in_memory, counts in ((100, 0, [4]), (24, 0, [3]), (24, 20, [1]), (10, 10, [])):
        harness = Harness("a", "b", "c", most_jobs=most_jobs, most_bytes=1 << 40)
        harness.models["c"].active = None
        harness.claim()
        harness.leased.take([job_of() for _ in range(in_memory)])
        harness.claimer.arm()
        assert [count for _, count in harness.broker.armed] == counts, (most_jobs, in_memory)


def test_the_wait_ends_with_the_ring_of_another_thread():
    """The blocking claim stays; many rings wake it once, and a ring before the wait is not lost."""
    harness = Harness()
    harness.claim()
    harness.claimer.arm()
    for _ in range(3):
        harness.claimer.wake_up.ring()
    assert harness.claimer.wait(60.0) == []
    assert harness.is_armed()
    poller = select.poll()
    poller.register(harness.claimer.wake_up.fd, select.POLLIN)
    assert poller.poll(0) == []


def test_a_blocking_claim_that_does_not_answer_is_withdrawn():
    """On a half-open connection no answer ever comes: after its time and a moment the worker asks again."""
    harness = Harness()
    harness.claim()
    harness.claimer.arm()
    overdue = harness.claimer.next_wakeup()
    assert 1.0 < overdue - harness.now < 2.0
    harness.claimer.wait(0.0)
    assert harness.is_armed()
    harness.now = overdue
    harness.claimer.wait(0.0)
    assert not harness.is_armed()
    harness.claimer.arm()
    assert len(harness.broker.armed) == 2


def test_a_withdrawn_claim_returns_the_jobs_that_it_had():
    """They are leased to this worker already; without a blocking claim there is nothing to withdraw."""
    harness = Harness()
    assert harness.claimer.disarm() == []
    harness.claim()
    harness.claimer.arm()
    harness.publish("double", 2)
    assert len(harness.claimer.disarm()) == 2
    assert not harness.is_armed()


def test_after_a_broken_connection_a_blocking_claim_is_left_anew():
    """The former one is gone with its connection."""
    harness = Harness()
    harness.claim()
    harness.claimer.arm()
    harness.claimer.reset()
    assert not harness.is_armed()
    harness.claimer.arm()
    harness.publish("double", 1)
    assert len(harness.claimer.wait(60.0)) == 1


def test_crash_points_surround_what_an_exchange_does():
    """A claim alone passes no point of a commit."""
    harness = Harness()
    harness.publish("double", 1)
    (delivery,) = harness.claim()
    assert harness.checkpoints == ["before-claim"]
    harness.checkpoints.clear()
    commit = Commit("double", Priority.NORMAL, delivery.entry_id, "double.x", State.COMPLETED, b"", "acme")
    harness.claimer.exchange([commit], [])
    assert harness.checkpoints == ["before-commit", "after-commit"]


def test_a_model_with_large_jobs_leaves_the_others_their_shares():
    """Half of the bytes is divided evenly; what is free of the other half is divided anew in each round trip."""
    harness = Harness("a", "b", most_bytes=1000)
    assert [harness.bytes_wanted() for _ in range(2)] == [{"a": 500, "b": 500}] * 2
    harness.hold("a", 900)
    assert harness.bytes_wanted() == {"b": 250}
    harness.hold("b", 249)
    assert harness.bytes_wanted() == {"b": 1}
    harness.hold("b", 1)
    assert harness.bytes_wanted() == {}


def test_a_claim_that_ended_for_want_of_bytes_has_not_seen_its_queue_empty():
    """The worker asks again as soon as there are bytes, and waits for the queue only when it was seen empty."""
    harness = Harness(most_bytes=10)
    harness.publish("double", 3, sealed=bytes(10))
    (first,) = harness.claim()
    assert harness.wanted() == {"double": CAPACITY}
    harness.claimer.arm()
    assert not harness.is_armed()
    assert len(harness.claim()) == 1
    assert first.sealed == bytes(10)
    assert len(harness.claim()) == 1
    assert harness.claim() == []
    harness.claimer.arm()
    assert harness.is_armed()


def test_no_blocking_claim_while_a_model_has_no_bytes_left():
    """Its queue was seen empty, but what comes into it now finds no room."""
    harness = Harness("a", "b", most_bytes=1000)
    assert harness.claim() == []
    harness.hold("a", 750)
    harness.claimer.arm()
    assert not harness.is_armed()
    before = harness.claimer.may_wait
    harness.leased.drop(list(harness.leased._held.values()))
    assert (before, harness.claimer.may_wait) == (False, True)
    harness.claimer.arm()
    assert harness.is_armed()


def test_a_blocking_claim_is_bounded_by_the_largest_job_so_far():
    """A hundred such jobs fit, four queues share them; one of each is always welcome."""
    for size, count in ((1, 4), (100, 2), (1000, 1)):
        harness = Harness(most_bytes=1000)
        harness.publish("double", 1, sealed=bytes(size))
        harness.claim()
        assert harness.claim() == []
        harness.claimer.arm()
        assert [armed for _, armed in harness.broker.armed] == [count], size


def test_an_engine_without_a_free_seat_waits_for_urgent_jobs():
    """The blocking claim names the priorities above those that are here: one of them ends the wait, others do not."""
    harness = Harness("text", "other")
    harness.seat("text", 2)
    harness.take("text", 2)
    assert harness.claim() == []
    harness.claimer.arm(may_be_narrow=False)
    assert not harness.is_armed()
    harness.claimer.arm()
    assert (harness.broker.armed, harness.broker.bands) == ([(["text", "other"], 1)], [{"text": int(Priority.NORMAL)}])
    harness.publish("text", 3)
    assert harness.claimer.wait(0.0) == []
    assert (harness.wanted(), harness.claimer.widen()) == ({}, [])
    harness.publish("text", 1, priority=Priority.HIGH)
    assert [delivery.priority for delivery in harness.claimer.wait(60.0)] == [Priority.HIGH]
    assert not harness.is_armed()


def test_a_claim_of_urgent_jobs_is_withdrawn_for_a_free_seat():
    """What came for the other priorities meanwhile is claimed then, in one exchange."""
    harness = Harness("text")
    harness.seat("text", 2)
    assert harness.claim() == []
    harness.take("text", 2)
    harness.claimer.arm()
    harness.publish("text", 3)
    harness.end("text", 1)
    assert (harness.claimer.widen(), harness.is_armed()) == ([], False)
    before = harness.claimer.has_widened
    assert harness.wanted() == {"text": 1}
    assert (before, harness.claimer.has_widened) == (True, False)
    assert len(harness.claim()) == 1


def test_a_claim_of_urgent_jobs_follows_what_is_here():
    """It is left anew when less urgent jobs are here; what it had claimed by then is not lost. None can pass a critical
    one, nor come in where the room for urgent jobs is taken."""
    harness = Harness("text")
    harness.seat("text", 2)
    harness.take("text", 2, Priority.HIGH)
    harness.claimer.arm()
    harness.take("text", 1, Priority.LOW)
    harness.publish("text", 1, priority=Priority.CRITICAL)
    assert len(harness.claimer.widen()) == 1
    harness.claimer.arm()
    assert harness.broker.bands == [{"text": int(Priority.HIGH)}, {"text": int(Priority.LOW)}]
    harness.take("text", 1)
    assert (harness.claimer.widen(), harness.is_armed()) == ([], False)
    harness.claimer.arm()
    assert not harness.is_armed()
    critical = Harness("text")
    critical.seat("text", 2)
    critical.take("text", 2, Priority.CRITICAL)
    critical.claimer.arm()
    assert not critical.is_armed()


def test_a_wake_up_that_a_model_closed_wakes_nothing_else():
    """Its number is given to nothing that is opened next. Threads go on ringing, the I/O thread goes on claiming."""
    harness = Harness()
    wake_up = harness.claimer.wake_up
    os.close(wake_up.fd)
    taken = os.eventfd(0)
    wake_up.ring()
    assert wake_up.is_lost
    harness.publish("double", 1)
    assert len(harness.claim()) == 1
    assert harness.claimer.wait(0.0) == []
    os.set_blocking(taken, False)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(taken)
    # Closed once more with its wake-up.
    os.dup2(taken, wake_up.fd)
    os.close(taken)


@pytest.mark.parametrize(("most_jobs_of_10_mb", "count"), [(1, 1), (8, 2), (100, 4)])
def test_the_first_blocking_claim_expects_the_largest_jobs(most_jobs_of_10_mb: int, count: int):
    """Jobs of any size may come between the last claim and this one, and it has seen none."""
    harness = Harness(most_bytes=most_jobs_of_10_mb * MAX_JOB_BYTES)
    harness.claim()
    harness.claimer.arm()
    assert [armed for _, armed in harness.broker.armed] == [count]
