"""Leaders and followers: which jobs share a forward, and which jobs return when a leader ends."""

from __future__ import annotations

import pytest

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import JobHeader, Keyring, Options, Retry
from penstock.registry.queues import Priority, new_job_id
from penstock.workers.backlog import Waiting
from penstock.workers.cache import JobKeys, SingleFlight
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.version import ServedVersion
from tests.workers.cache.equal_jobs import OpenedJobs
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
    return ClaimedJob(Delivery("m", Priority.NORMAL, b"1-1", b""), header, b"", 1, 0.0, 0.0, 0, known_digest=digest)


def joins(flights: SingleFlight, job: ClaimedJob, version: ServedVersion) -> bool:
    """Whether the job follows an equal one."""
    return bool(flights.join_all([job], version)[1])


def test_the_first_of_equal_jobs_leads(flights: SingleFlight, version: ServedVersion):
    """Later ones follow it, in the order in which they came, each with the version that it waits for."""
    leader, first, second, other = job(), job(), job(), job(b"another")
    assert [joins(flights, each, version) for each in (leader, first, second, other)] == [False, True, True, False]
    assert flights.end(leader) == [Waiting(first, version), Waiting(second, version)]
    assert flights.end(other) == []


def test_a_leader_stays_the_leader_when_it_joins_again(flights: SingleFlight, version: ServedVersion):
    """A job does not follow itself, for example after it was routed twice."""
    leader, follower = job(), job()
    assert not joins(flights, leader, version)
    assert joins(flights, follower, version)
    assert not joins(flights, leader, version)
    assert flights.end(leader) == [Waiting(follower, version)]


def test_only_jobs_of_one_tenant_share_a_forward(flights: SingleFlight, version: ServedVersion):
    """The other job runs by itself, and its end changes nothing. Retry policies may differ: no failure is shared."""
    leader, alone, follower = job(), job(tenant="umbrella"), job(retry=Retry(attempts=2))
    assert [joins(flights, each, version) for each in (leader, alone, follower)] == [False, False, True]
    assert flights.end(alone) == []
    assert flights.end(leader) == [Waiting(follower, version)]


def test_an_ended_leader_is_forgotten(flights: SingleFlight, version: ServedVersion):
    """The next equal job leads; a second end of the former leader returns nothing and ends no other flight."""
    former, leader, follower = job(), job(), job()
    joins(flights, former, version)
    assert flights.end(former) == []
    assert not joins(flights, leader, version)
    assert joins(flights, follower, version)
    assert flights.end(former) == []
    assert flights.end(leader) == [Waiting(follower, version)]


def test_a_job_without_a_digest_leads_nothing(flights: SingleFlight, version: ServedVersion):
    """Its end returns no followers of another job."""
    leader, follower = job(), job()
    joins(flights, leader, version)
    joins(flights, follower, version)
    assert flights.end(job(b"")) == []
    assert flights.end(follower) == []
    assert flights.end(leader) == [Waiting(follower, version)]


def test_all_ended_jobs_are_returned_with_their_followers_behind_them(flights: SingleFlight, version: ServedVersion):
    """A worker that gives jobs back gives each leader back with its followers."""
    first, its_follower, second = job(b"a"), job(b"a"), job(b"b")
    for each in (first, its_follower, second):
        joins(flights, each, version)
    assert flights.end_all([second, first]) == [second, first, its_follower]
    assert flights.end_all([first]) == [first]


def test_the_followers_of_several_jobs_stay_until_their_leaders_end(flights: SingleFlight, version: ServedVersion):
    """Only leaders with followers are named: neither a job that runs by itself, nor one that has ended."""
    leader, its_follower, by_itself, alone = job(b"a"), job(b"a"), job(b"a", tenant="umbrella"), job(b"b")
    assert flights.followers_of([leader]) == {}
    assert flights.join_all([leader, its_follower, by_itself, alone], version) == (
        [leader, by_itself, alone],
        [its_follower],
    )
    for _ in range(2):
        assert flights.followers_of([by_itself, alone, leader, job(b"")]) == {leader: [Waiting(its_follower, version)]}
    assert flights.end_all([by_itself, leader, alone]) == [by_itself, leader, its_follower, alone]
    assert flights.followers_of([by_itself, alone, leader]) == {}


def test_followers_leave_alone(flights: SingleFlight, version: ServedVersion):
    """Those that are meant, each judged with its own leader; the leaders go on, and the other followers with them."""
    leader, gone, left, other, its_follower = (job(digest) for digest in (b"a", b"a", b"a", b"b", b"b"))
    flights.join_all([leader, gone, left, other, its_follower], version)
    asked: list[tuple[ClaimedJob, ClaimedJob]] = []

    def is_meant(leader: ClaimedJob, follower: ClaimedJob) -> bool:
        asked.append((leader, follower))
        return follower in (gone, its_follower)

    assert flights.take_followers(is_meant) == [Waiting(gone, version), Waiting(its_follower, version)]
    assert asked == [(leader, gone), (leader, left), (other, its_follower)]
    assert flights.end_all([leader, other]) == [leader, left, other]
    assert flights.take_followers(is_meant) == []


def test_a_leader_whose_followers_have_left_still_leads(flights: SingleFlight, version: ServedVersion):
    """The next equal job follows it."""
    leader, follower, next_one = job(), job(), job()
    flights.join_all([leader, follower], version)
    assert flights.take_followers(lambda _leader, _follower: True) == [Waiting(follower, version)]
    assert joins(flights, next_one, version)
    assert flights.end(leader) == [Waiting(next_one, version)]


def test_the_first_follower_to_expire_is_known(flights: SingleFlight, version: ServedVersion):
    """It is asked in every turn. Leaders do not count, nor followers that have left."""
    jobs = [job() for _ in range(3)]
    for each, expires_ms in zip(jobs, (1, 20, 10), strict=True):
        each.expires_ms = expires_ms
    flights.join_all(jobs, version)
    assert [flights.may_have_late(now) for now in (10, 11)] == [False, True]
    assert flights.take_followers(lambda _leader, follower: follower is jobs[2]) == [Waiting(jobs[2], version)]
    assert [flights.may_have_late(now) for now in (20, 21)] == [False, True]
    assert flights.take_followers(lambda _leader, _follower: True) == [Waiting(jobs[1], version)]
    assert not flights.may_have_late(1e15)


def test_a_late_follower_that_stays_is_looked_at_once(flights: SingleFlight, version: ServedVersion):
    """Its leader has begun: nothing changes for it, however many turns the forward takes."""
    jobs = [job() for _ in range(3)]
    for each, expires_ms in zip(jobs, (1, 10, 20), strict=True):
        each.expires_ms = expires_ms
    flights.join_all(jobs, version)
    assert flights.may_have_late(15)
    assert flights.take_followers(lambda _leader, _follower: False, looked_at_ms=15) == []
    assert [flights.may_have_late(now) for now in (15, 20, 21)] == [False, False, True]
    assert flights.end_all([jobs[0]]) == jobs


def test_jobs_with_one_header_are_still_told_apart_by_their_digest(flights: SingleFlight, version: ServedVersion):
    """Their tenant is equal, their inputs are not."""
    opened, keys = OpenedJobs(Keyring.parse(None)), JobKeys(isolates_tenants=True)
    jobs = [opened.open(number, options=Options(retry=Retry(attempts=2))) for number in (1, 2, 1)]
    assert jobs[0].shared is jobs[1].shared is jobs[2].shared is not None
    keys.begin_all(jobs, "1")
    assert flights.join_all(jobs, version) == (jobs[:2], jobs[2:])
    other = opened.open(1, options=Options(retry=Retry(attempts=3)))
    keys.begin_all([other], "1")
    assert other.digest == jobs[0].digest
    assert flights.join_all([other], version) == ([], [other])


def test_leaders_that_are_unlike_all_others_need_no_digest(flights: SingleFlight, version: ServedVersion):
    """Until another job joins: then an equal one follows its leader, and those that have ended lead no longer."""
    opened, keys = OpenedJobs(Keyring.parse(None)), JobKeys(isolates_tenants=True)
    ended, leader, other, equal, late = (opened.open(number) for number in (1, 2, 3, 2, 1))
    keys.begin_all([ended, leader, other, equal, late], "1")
    flights.lead_all([ended, leader, other])
    assert flights.end_all([ended]) == [ended]
    assert flights.followers_of([leader, other]) == {}
    assert [each.known_digest for each in (ended, leader, other)] == [b""] * 3
    assert flights.join_all([equal, late], version) == ([late], [equal])
    assert flights.end_all([other, leader]) == [other, leader, equal]
    assert flights.end(late) == []
    assert (flights._leaders, flights._followers, flights._alone) == ({}, {}, {})
