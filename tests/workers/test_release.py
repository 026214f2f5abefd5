"""The releaser: jobs that go back to the queue, and jobs that go to the workers that have their version."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from penstock.registry.broker.base import Claim, Delivery, Held, Limits, Publication
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.queues import Priority
from penstock.workers.batch_run import BatchRun
from penstock.workers.cache import SingleFlight
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs
from penstock.workers.release import Releaser
from tests.workers.doubles import job_of, ready_version, run_of

LEASE_MS = 5000


class AwayBroker(MemoryBroker):
    """A broker that is away while `is_away` is set, and counts the releases that it was asked for."""

    def __init__(self) -> None:
        super().__init__(lambda: 1000.0)
        self.is_away = False
        self.calls = 0
        self.suspected: list[tuple[str, list[bytes]]] = []

    def release(self, consumer: str, held: Sequence[Held], *, version: str = "") -> None:
        self.calls += 1
        if self.is_away:
            raise BrokerUnavailable("away")
        super().release(consumer, held, version=version)

    def suspect(self, slot: str, jobs: Sequence[Held], incident: str, ttl_ms: int) -> None:
        if self.is_away:
            raise BrokerUnavailable("away")
        self.suspected.append((incident, [job.entry_id for job in jobs]))
        super().suspect(slot, jobs, incident, ttl_ms)


class Harness:
    """A releaser of one worker, and jobs that this worker has claimed."""

    def __init__(self) -> None:
        self.broker = AwayBroker()
        self.leased, self.flights = LeasedJobs(), SingleFlight()
        self.version = ready_version()
        self.releaser = Releaser(self.broker, "worker-1", self.leased, self.flights, 60_000)

    def claimed(self, count: int) -> list[ClaimedJob]:
        """So many jobs, leased to this worker."""
        sealed = [Publication(job_of().header.id, Priority.NORMAL, b"a job", "acme") for _ in range(count)]
        self.broker.publish("double", sealed, Limits(1000, 0, 60_000))
        _, deliveries = self.broker.exchange("worker-1", [], [Claim("double", count, 0, 1000)], 60_000)
        jobs = []
        for delivery in deliveries:
            job = job_of()
            job.delivery = delivery
            jobs.append(job)
        self.leased.take(jobs)
        return jobs

    def interrupted(self, *jobs: ClaimedJob, incident: str = "7f3a") -> BatchRun:
        """The run of these jobs, in which the process of an instance ended."""
        run = run_of(self.version, *jobs)
        run.incident = incident
        return run

    def taken_over(self) -> list[Delivery]:
        """The jobs that another worker takes over without waiting for a lease."""
        return self.broker.take_over("worker-2", "double", LEASE_MS, 10)


@pytest.fixture
def harness() -> Harness:
    return Harness()


def entries(jobs: Sequence[ClaimedJob]) -> list[bytes]:
    return [job.delivery.entry_id for job in jobs]


def test_a_released_job_is_free_for_another_worker_at_once(harness: Harness):
    """Its delivery here is not counted, and nothing of it stays in this worker's memory."""
    given, kept = harness.claimed(2)
    harness.releaser.add([given])
    assert harness.taken_over() == [], "nothing is released before the flush"
    harness.releaser.flush()
    (delivery,) = harness.taken_over()
    assert (delivery.entry_id, delivery.attempt) == (given.delivery.entry_id, 1)
    assert (given.is_lost, kept.is_lost) == (True, False), "a commit of it would be fenced"
    assert [held.entry_id for held in harness.leased.snapshot()] == entries([kept])


def test_followers_are_released_with_their_leader(harness: Harness):
    """An equal job that comes afterwards leads anew."""
    version = ready_version()
    leader, follower, later = jobs = harness.claimed(3)
    for job in jobs:
        job.digest = b"equal"
    assert harness.flights.join_all([leader, follower], version) == ([leader], [follower])
    harness.releaser.add([leader])
    harness.releaser.flush()
    assert [delivery.entry_id for delivery in harness.taken_over()] == entries([leader, follower])
    assert harness.flights.join_all([later], version) == ([later], [])


def test_jobs_are_kept_while_the_broker_is_away(harness: Harness):
    """The next flush releases them together with those that were added meanwhile, and each of them once."""
    first, second = harness.claimed(2)
    harness.releaser.add([first])
    harness.broker.is_away = True
    with pytest.raises(BrokerUnavailable):
        harness.releaser.flush()
    assert len(harness.leased) == 2, "its lease is still renewed"
    harness.releaser.add([second])
    harness.broker.is_away = False
    harness.releaser.flush()
    assert [delivery.entry_id for delivery in harness.taken_over()] == entries([first, second])
    harness.releaser.flush()
    assert (harness.broker.calls, len(harness.leased)) == (2, 0)


def test_without_jobs_the_broker_is_not_asked(harness: Harness):
    """A flush is a part of every turn."""
    harness.releaser.flush()
    harness.releaser.add([])
    harness.releaser.flush()
    assert harness.broker.calls == 0


def test_a_job_is_handed_over_to_a_worker_with_its_version(harness: Harness):
    """Only a worker that offers this version gets it now; others wait for as long as a lease."""
    (job,) = harness.claimed(1)
    harness.releaser.hand_over([job], "double", "2")
    assert (job.is_lost, len(harness.leased)) == (True, 0)
    assert harness.taken_over() == []
    assert harness.broker.adopt("worker-2", "double", ["1"], 10) == []
    (delivery,) = harness.broker.adopt("worker-2", "double", ["1", "2"], 10)
    assert (delivery.entry_id, delivery.attempt) == (job.delivery.entry_id, 1)


def test_a_hand_over_that_did_not_reach_the_broker_has_done_nothing(harness: Harness):
    """The caller keeps the jobs: they are this worker's, and may run here yet."""
    (job,) = harness.claimed(1)
    harness.broker.is_away = True
    with pytest.raises(BrokerUnavailable):
        harness.releaser.hand_over([job], "double", "2")
    assert (job.is_lost, len(harness.leased)) == (False, 1)


def test_jobs_of_a_lost_instance_are_released_with_one_crash_each(harness: Harness):
    """Whoever takes them over knows that a process died while they ran. Their room here is free at once."""
    first, second, other = harness.claimed(3)
    run = harness.interrupted(first, second)
    assert (harness.version.queue.in_flight, harness.version.queue.in_memory) == (1, 2)
    harness.releaser.add_interrupted([run])
    assert (harness.version.queue.in_flight, harness.version.queue.in_memory) == (0, 0)
    harness.releaser.flush()
    harness.releaser.flush()
    assert harness.broker.suspected == [("worker-1 7f3a", entries([first, second]))]
    assert [(each.entry_id, each.crashes) for each in harness.taken_over()] == [
        (first.delivery.entry_id, 1),
        (second.delivery.entry_id, 1),
    ]
    assert [held.entry_id for held in harness.leased.snapshot()] == entries([other])


def test_a_follower_of_such_a_job_has_no_crash(harness: Harness):
    """It did not run."""
    leader, follower = jobs = harness.claimed(2)
    for job in jobs:
        job.digest = b"equal"
    harness.flights.join_all(jobs, harness.version)
    harness.releaser.add_interrupted([harness.interrupted(leader)])
    harness.releaser.flush()
    assert [(each.entry_id, each.crashes) for each in harness.taken_over()] == [
        (leader.delivery.entry_id, 1),
        (follower.delivery.entry_id, 0),
    ]


def test_crashes_are_counted_before_the_release_also_when_the_broker_was_away(harness: Harness):
    """Two instances that died are two crashes; each is counted once."""
    first, second = harness.claimed(2)
    runs = [harness.interrupted(first), harness.interrupted(second, incident="9b1c")]
    harness.releaser.add_interrupted(runs)
    harness.broker.is_away = True
    with pytest.raises(BrokerUnavailable):
        harness.releaser.flush()
    assert harness.taken_over() == []
    harness.broker.is_away = False
    harness.releaser.flush()
    assert sorted(incident for incident, _ in harness.broker.suspected) == ["worker-1 7f3a", "worker-1 9b1c"]
    assert sorted((each.entry_id, each.crashes) for each in harness.taken_over()) == sorted(
        (job.delivery.entry_id, 1) for job in (first, second)
    )
