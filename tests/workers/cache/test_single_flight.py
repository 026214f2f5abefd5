"""Leaders and followers: which jobs share a forward, and which jobs return when a leader ends."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import JobHeader, Options, Retry
from penstock.registry.queues import Priority, new_job_id
from penstock.workers.backlog import Waiting
from penstock.workers.cache import SingleFlight
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.version import ServedVersion
from tests.workers.doubles import version_of
from tests.workers.levels.fake_model import Clock, Rotation


@pytest.fixture
def flights() -> SingleFlight:
    """A worker without jobs."""
    return SingleFlight()


@pytest.fixture
def version() -> ServedVersion:
    """The version that the jobs are for."""
    runtime = Rotation(Clock(), {})
    return version_of(runtime, runtime.spec, 8)


def job(digest: bytes = b"digest", *, tenant: str = "acme", retry: Retry | None = None) -> ClaimedJob:
    """A claimed job. Jobs with one digest are equal."""
    header = JobHeader(new_job_id("m"), tenant, "m", "normal", (), options=Options(retry=retry))
    return ClaimedJob(Delivery("m", Priority.NORMAL, b"1-1", b""), header, {}, 1, 0.0, 0.0, 0, digest)


def test_the_first_of_equal_jobs_leads(flights: SingleFlight, version: ServedVersion):
    """Later ones follow it, in the order in which they came, each with the version that it waits for."""
    leader, first, second, other = job(), job(), job(), job(b"another")
    assert [flights.join(each, version) for each in (leader, first, second, other)] == [False, True, True, False]
    assert flights.end(leader) == [Waiting(first, version), Waiting(second, version)]
    assert flights.end(other) == []


def test_a_leader_stays_the_leader_when_it_joins_again(flights: SingleFlight, version: ServedVersion):
    """A job does not follow itself, for example after it was routed twice."""
    leader, follower = job(), job()
    assert not flights.join(leader, version)
    assert flights.join(follower, version)
    assert not flights.join(leader, version)
    assert flights.end(leader) == [Waiting(follower, version)]


@pytest.mark.parametrize("other", [{"tenant": "umbrella"}, {"retry": Retry(attempts=2)}], ids=["tenant", "retry"])
def test_only_one_tenants_jobs_with_one_retry_policy_share_a_forward(
    flights: SingleFlight, version: ServedVersion, other: dict[str, Any]
):
    """The shared answer may be a failure. The other job runs by itself, and its end changes nothing."""
    leader, alone, follower = job(), job(**other), job()
    assert [flights.join(each, version) for each in (leader, alone, follower)] == [False, False, True]
    assert flights.end(alone) == []
    assert flights.end(leader) == [Waiting(follower, version)]


def test_an_ended_leader_is_forgotten(flights: SingleFlight, version: ServedVersion):
    """The next equal job leads; a second end of the former leader returns nothing and ends no other flight."""
    former, leader, follower = job(), job(), job()
    flights.join(former, version)
    assert flights.end(former) == []
    assert not flights.join(leader, version)
    assert flights.join(follower, version)
    assert flights.end(former) == []
    assert flights.end(leader) == [Waiting(follower, version)]


def test_a_job_without_a_digest_leads_nothing(flights: SingleFlight, version: ServedVersion):
    """Its end returns no followers of another job."""
    leader, follower = job(), job()
    flights.join(leader, version)
    flights.join(follower, version)
    assert flights.end(job(b"")) == []
    assert flights.end(follower) == []
    assert flights.end(leader) == [Waiting(follower, version)]


def test_all_ended_jobs_are_returned_with_their_followers_behind_them(flights: SingleFlight, version: ServedVersion):
    """A worker that gives jobs back gives each leader back with its followers."""
    first, its_follower, second = job(b"a"), job(b"a"), job(b"b")
    for each in (first, its_follower, second):
        flights.join(each, version)
    assert flights.end_all([second, first]) == [second, first, its_follower]
    assert flights.end_all([first]) == [first]
