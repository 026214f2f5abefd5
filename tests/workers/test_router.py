"""The router: the way of a job that was claimed, that is not placed yet, or that has waited between two tries."""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.deployment import Deployment
from penstock.registry.envelope import Failure, JobHeader, Keyring, Options, Retry
from penstock.registry.queues import reply_key
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.unrun import CANCELLED, EXPIRED
from penstock.safety.cache_entry import key_of
from penstock.workers.cache import AnswerCache, SingleFlight
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.listener import NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import REVOKED, EncodedOutputs
from penstock.workers.router import Answered, Aside, HandOver, JobRouter, Route, Run, Suspect
from penstock.workers.versions.peers import Peers
from penstock.workers.versions.placement import Placement
from penstock.workers.versions.version import ServedVersion, VersionState
from tests.workers.cache.equal_jobs import OpenedJobs, apart
from tests.workers.doubles import Doubler, cold_version, counted, job_of, lifecycle_of, spec_of


class Revocations(NullListener):
    """Revokes some jobs, and remembers which were started."""

    def __init__(self) -> None:
        self.revoked: set[str] = set()
        self.begun: list[str] = []

    @property
    def has_revoked(self) -> bool:
        return bool(self.revoked)

    def is_revoked(self, job_id: str) -> bool:
        return job_id in self.revoked

    def started(self, jobs: Sequence[JobHeader], at: float) -> None:
        self.begun += [header.id for header in jobs]


class Harness:
    """A router over real versions of one model, `double`, at the broker's time 0. Version 1 is active and ready."""

    def __init__(self, *, preloads: bool = True, isolates_tenants: bool = False, **settings: Any) -> None:
        config = InferenceConfig.model_validate({"batching": {"max_batch_size": 2}, **settings})
        self.now = 100.0
        self.broker = MemoryBroker(lambda: self.now)
        self.metrics = InferenceMetrics((1.0,))
        self.listener = Revocations()
        self.paused: set[str] = set()
        self.flights = SingleFlight()
        self.answers = AnswerCache(config.cache, lambda: self.now)
        self.lifecycle = lifecycle_of(config, [spec_of()], self.broker, self.metrics, lambda: self.now)
        self.placement = Placement(
            self.lifecycle, Peers(self.broker, "here", lambda: self.now), lambda: self.now, most_waiting=10
        )
        self.router = JobRouter(
            self.lifecycle,
            self.placement,
            self.answers,
            self.flights,
            self.listener,
            self.metrics,
            is_paused=self.paused.__contains__,
            preloads=preloads,
            isolates_tenants=isolates_tenants,
        )
        (self.version,) = self.lifecycle.turns
        self.make_ready(self.version)

    def make_ready(self, version: ServedVersion) -> None:
        version.runtime = Doubler()
        version.has_loaded()

    def add_version(self, label: str) -> ServedVersion:
        """One more version of the model, not loaded."""
        version = cold_version(spec_of(version=label), 2)
        self.lifecycle.models["double"].versions[label] = version
        self.lifecycle.turns.append(version)
        return version

    def route(self, job: ClaimedJob) -> Route:
        return self.router.route(job, 0.0)


@pytest.mark.parametrize("fate", ["expired", "revoked"])
def test_a_job_that_must_not_run_is_answered_before_any_version_is_chosen(fate: str):
    """The refusal has no version, so it starts no load and takes no room."""
    harness = Harness()
    harness.version.unload()
    job = job_of(expires_ms=-1 if fate == "expired" else 0)
    if fate == "revoked":
        harness.listener.revoked.add(job.header.id)
    route = harness.route(job)
    assert isinstance(route, Answered)
    assert route.outcome.answer is {"expired": EXPIRED, "revoked": REVOKED}[fate]
    assert (route.outcome.how, route.outcome.version) == ("refused", None)
    assert harness.version.state is VersionState.COLD
    assert harness.route(job_of(expires_ms=0)) is Aside.GIVE_BACK, "at the very moment of its deadline a job may begin"


def test_a_job_of_another_signature_fails_with_the_reason():
    """The client checked the job against an older spec than the one that is served now."""
    harness = Harness()
    job = job_of(1)
    job.decoded = {"z": job.inputs["x"]}
    route = harness.route(job)
    assert isinstance(route, Answered)
    assert route.outcome.failure is not None
    assert route.outcome.failure.code == "InputRefused"
    assert "z" in route.outcome.failure.message


def test_an_equal_job_follows_and_is_reported_as_started():
    """The first of equal jobs runs, the second follows it, other inputs run; the rows of each are counted."""
    harness = Harness()
    leader, equal, other = job_of(7), job_of(7), job_of(7, 8)
    for job in (leader, equal, other):
        job.rows = 0
    assert [harness.route(job) for job in (leader, equal, other)] == [
        Run(harness.version),
        Aside.FOLLOWS,
        Run(harness.version),
    ]
    assert harness.listener.begun == [equal.header.id]
    assert [job.rows for job in (leader, equal, other)] == [1, 1, 2]
    assert counted(harness.metrics, "penstock_single_flight", "1", "queue") == 1


@pytest.mark.parametrize("has_cache", [False, True])
def test_new_inputs_need_no_digest(has_cache: bool):
    """A look-up is counted for each where there is a cache; an equal job still follows the first one."""
    harness = Harness(cache={"enabled": has_cache})
    jobs = [job_of(7), job_of(8)]
    assert [harness.route(job) for job in jobs] == [Run(harness.version)] * 2
    assert [job.known_digest for job in jobs] == [b"", b""]
    assert sum(harness.answers.take_accesses().values()) == 2 * has_cache
    assert harness.route(job_of(8)) is Aside.FOLLOWS
    assert all(job.known_digest for job in jobs)


def test_leaders_are_followed_whatever_the_cache_holds():
    """A cache of one answer forgets the others. The jobs that run are remembered all the same."""
    harness = Harness(cache={"enabled": True, "l1_size": 1})
    for number in range(20):
        assert harness.route(job_of(number)) == Run(harness.version)
    assert harness.route(job_of(0)) is Aside.FOLLOWS


@pytest.mark.parametrize("isolates", [True, False])
def test_jobs_share_a_key_only_within_a_version_and_perhaps_within_a_tenant(isolates: bool):
    """Equal jobs of two versions never share a key, and those of two tenants share one only without isolation."""
    harness = Harness(isolates_tenants=isolates)
    harness.make_ready(harness.add_version("2"))
    first, of_other_tenant, of_other_version = job_of(7), job_of(7, tenant="other"), job_of(7, version="2")
    for job in (first, of_other_tenant, of_other_version):
        harness.route(job)
    assert (first.digest == of_other_tenant.digest) is not isolates
    assert first.digest != of_other_version.digest


def test_a_cached_answer_ends_the_job_unless_its_model_is_paused():
    """The outcome carries the cached outputs; a paused model answers nothing, so its job waits."""
    harness = Harness(cache={"enabled": True})
    first = job_of(7)
    harness.route(first)
    outputs = EncodedOutputs((), b"", harness.version.content_hash, harness.version.generation)
    harness.answers.memory.put(first.digest, outputs, 60.0)
    harness.flights.end(first)
    route = harness.route(job_of(7))
    assert isinstance(route, Answered)
    assert (route.outcome.answer, route.outcome.how, route.outcome.version) == (outputs, "cached", harness.version)
    harness.paused.add("double")
    assert harness.route(job_of(7)) == Run(harness.version)


def test_a_cold_active_version_loads_while_other_workers_get_its_jobs():
    """With `preload` the job goes back, and the load has begun."""
    harness = Harness()
    harness.version.unload()
    assert harness.route(job_of(1)) is Aside.GIVE_BACK
    assert harness.version.state is VersionState.LOADING


def test_without_preload_jobs_wait_for_a_cold_version_up_to_its_capacity():
    """A job runs there later; beyond the capacity of the queue jobs go back."""
    harness = Harness(preloads=False)
    harness.version.unload()
    for _ in range(harness.version.queue.capacity):
        job = job_of(1, crashes=1)
        assert harness.route(job) == Suspect(harness.version)
        harness.version.queue.reserve(job)
    assert harness.route(job_of(1, crashes=1)) is Aside.GIVE_BACK


def test_a_promotion_holds_from_the_claim_that_carries_it():
    """The job whose delivery has the new record runs on the promoted version, the job before it did not."""
    harness = Harness()
    promoted = harness.add_version("2")
    harness.make_ready(promoted)
    record = b"1 " + Deployment(1, "double", "2", Doubler.content_hash).seal()
    assert harness.route(job_of(1)) == Run(harness.version)
    assert harness.route(job_of(2, active=record)) == Run(promoted)
    assert harness.route(job_of(3, active=record)) == Run(promoted)


def test_a_job_that_names_a_version_waits_for_it_here_or_stays_unplaced():
    """A version with room takes its job; a full, failed or unknown version leaves it unplaced."""
    harness = Harness()
    other = harness.add_version("2")
    assert harness.route(job_of(1, version="2")) == Run(other)
    other.queue.in_memory = other.queue.capacity
    assert harness.route(job_of(1, version="2")) is Aside.UNPLACED, "its queue is full"
    other.queue.in_memory = 0
    other.has_failed("no weights")
    assert harness.route(job_of(2, version="2")) is Aside.UNPLACED
    assert harness.route(job_of(3, version="3")) is Aside.UNPLACED


def test_an_unplaced_job_is_handed_over_to_the_worker_that_reports_its_version():
    """Until a worker reports the version the job goes on waiting."""
    harness = Harness()
    assert harness.router.place(job_of(1, version="3"), 0.0, waiting=0) is Aside.UNPLACED
    offer = {"name": "there", "ready": True, "versions": {"double": {"3": {"content_hash": "", "is_offered": True}}}}
    harness.broker.report("there", json.dumps(offer).encode(), 60_000)
    harness.now += 2
    harness.placement.look()
    assert harness.router.place(job_of(1, version="3"), 0.0, waiting=0) == HandOver("3")


@pytest.mark.parametrize(
    ("fate", "answer"), [("expired", EXPIRED), ("cancelled", CANCELLED), ("lost", CANCELLED), ("crowded", None)]
)
def test_an_unplaced_job_can_end_without_a_version(fate: str, answer: Failure | None):
    """Its deadline, a cancellation, a lost lease, or too many jobs that wait beside it: each ends the wait."""
    harness = Harness()
    job = job_of(1, version="3", expires_ms=50)
    job.is_cancelled, job.is_lost = fate == "cancelled", fate == "lost"
    waiting = 11 if fate == "crowded" else 10
    route = harness.router.place(job, 51.0 if fate == "expired" else 50.0, waiting=waiting)
    assert isinstance(route, Answered)
    if answer is not None:
        assert route.outcome.answer is answer
    else:
        assert route.outcome.failure is not None
        assert "not served by any live worker" in route.outcome.failure.message


@pytest.mark.parametrize("fate", ["cancelled", "lost", "revoked", "none"])
def test_a_delayed_job_resumes_unless_it_was_withdrawn_meanwhile(fate: str):
    """A refusal keeps the version, whose room the job may hold; otherwise the job has its next forward."""
    harness = Harness()
    job, suspect = job_of(1), job_of(1, crashes=1)
    job.is_cancelled, job.is_lost = fate == "cancelled", fate == "lost"
    if fate == "revoked":
        harness.listener.revoked.add(job.header.id)
    route = harness.router.resume(job, harness.version)
    if fate == "none":
        assert route == Run(harness.version)
        assert harness.router.resume(suspect, harness.version) == Suspect(harness.version)
    else:
        assert isinstance(route, Answered)
        assert route.outcome.answer is (REVOKED if fate == "revoked" else CANCELLED)
        assert route.outcome.version is harness.version


def test_followers_without_an_answer_get_a_new_leader_among_them():
    """The first that rejoins runs, and the others follow it."""
    harness = Harness()
    leader, first, second = job_of(7), job_of(7), job_of(7)
    assert [harness.route(job) for job in (leader, first, second)] == [
        Run(harness.version),
        Aside.FOLLOWS,
        Aside.FOLLOWS,
    ]
    harness.flights.end(leader)
    assert harness.router.rejoin(first, harness.version) == Run(harness.version)
    assert harness.router.rejoin(second, harness.version) is Aside.FOLLOWS


def test_followers_of_a_failed_leader_neither_lead_nor_follow():
    """The completer has taken their digest away."""
    harness = Harness()
    leader, *followers = [job_of(7) for _ in range(3)]
    for job in (leader, *followers):
        harness.route(job)
    harness.flights.end(leader)
    for job in followers:
        job.digest = b""
    assert [harness.router.rejoin(job, harness.version) for job in followers] == [Run(harness.version)] * 2


# Whole claims


class Claims:
    """Two routers alike: one is given whole claims, the other the same jobs one by one, with nothing known of their
    headers."""

    def __init__(self, *, ttl_s: float, shares: bool, isolates: bool, is_paused: bool) -> None:
        self.whole, self.single = (Harness(isolates_tenants=isolates) for _ in range(2))
        for harness in (self.whole, self.single):
            policy = replace(harness.version.policy, cache_ttl_s=ttl_s, shares_flights=shares)
            harness.version.policy = policy
            harness.paused = {"double"} if is_paused else set()
            harness.router._is_paused = harness.paused.__contains__
        self.opened = OpenedJobs(Keyring.parse(None))

    def keep(self, number: float) -> None:
        """Both caches have the answer to this number, if they keep answers."""
        for harness in (self.whole, self.single):
            job = self.opened.open(number)
            tenant = "acme" if harness.router._keys._isolates_tenants else ""
            answer = EncodedOutputs((), str(number).encode(), harness.version.content_hash, harness.version.generation)
            harness.answers.memory.put(key_of(job.header, job.body, "1", tenant=tenant), answer, 60.0)
            # An equal job was here before.
            harness.router._samples.are_new([job])

    def ways(self, jobs: Sequence[ClaimedJob]) -> tuple[dict[str, object], dict[str, object]]:
        """By the id of each job, how either router decided."""
        routed = self.whole.router.route_all(jobs, 0.0)
        whole: dict[str, object] = {}
        for version, running in routed.running.items():
            assert version is self.whole.version
            whole |= {job.header.id: "runs" for job in running}
        for cached in routed.cached:
            assert cached.version is self.whole.version
            whole |= {job.header.id: answer for job, answer in zip(cached.jobs, cached.answers, strict=True)}
        whole |= {job.header.id: _way(route) for job, route in routed.others}
        alone = apart(jobs)
        single = {job.header.id: _way(self.single.route(job)) for job in alone}
        assert [job.digest for job in jobs] == [job.digest for job in alone]
        assert [job.header.id for job in routed.running[self.whole.version]] == [
            each for each, way in single.items() if way == "runs"
        ], "the jobs that run stand in their order of arrival"
        return whole, {each: way for each, way in single.items() if way is not Aside.FOLLOWS}

    def followers(self) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
        """By the id of each leader, its followers, in either router."""

        def of(harness: Harness) -> dict[str, list[str]]:
            harness.flights._name_leaders()
            return {
                leader.header.id: [follower.header.id for follower, _ in harness.flights._followers.get(digest, ())]
                for digest, leader in harness.flights._leaders.items()
            }

        return of(self.whole), of(self.single)


def _way(route: Route) -> object:
    if isinstance(route, Run):
        return "runs"
    if isinstance(route, Answered):
        return route.outcome.answer
    return route if isinstance(route, Aside) else type(route)


_KINDS: list[dict[str, Any]] = [
    {},
    {"tenant": "umbrella"},
    {"options": Options(retry=Retry(attempts=2))},
    {"options": Options(outputs=("y",))},
    {"version": "1"},
    {"crashes": 1},
    {"attempt": 2},
    {"reply": reply_key("double", "a1")},
]


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from(range(len(_KINDS))) | st.just(0), st.integers(1, 4)), max_size=8),
        max_size=4,
    ),
    st.sets(st.integers(1, 4)),
    st.sampled_from([0.0, 60.0]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_a_claim_goes_the_ways_of_its_jobs(
    claims: list[list[tuple[int, int]]],
    kept: set[int],
    ttl_s: float,
    shares: bool,
    isolates: bool,
    is_paused: bool,
):
    """Run, cached, following or aside, with the same digests, counts, reports and order.

    Equal jobs, other tenants, other retry policies and jobs that are not plain stand in it beside each other.
    """
    both = Claims(ttl_s=ttl_s, shares=shares, isolates=isolates, is_paused=is_paused)
    for number in kept:
        both.keep(number)
    for claim in claims:
        jobs = [both.opened.open(number, **_KINDS[kind]) for kind, number in claim]
        whole, single = both.ways(jobs)
        assert whole == single
    assert operator.eq(*both.followers())
    assert sorted(both.whole.listener.begun) == sorted(both.single.listener.begun)
    assert both.whole.answers.take_accesses() == both.single.answers.take_accesses()
    assert operator.eq(
        *(counted(each.metrics, "penstock_single_flight", "1", "queue") for each in (both.whole, both.single))
    )
    assert operator.eq(*(list(each.answers.memory._entries) for each in (both.whole, both.single)))


def test_a_claim_of_equal_jobs_is_reported_and_looked_up_once():
    """One leads, the others follow it; one answer that is here serves all of them."""
    both = Claims(ttl_s=60.0, shares=True, isolates=True, is_paused=False)
    reports: list[int] = []
    both.whole.listener.started = lambda jobs, at: reports.append(len(jobs))  # type: ignore[method-assign]
    jobs = [both.opened.open(number) for number in (1, 1, 2, 1)]
    routed = both.whole.router.route_all(jobs, 0.0)
    assert (dict(routed.running), routed.cached, routed.others) == ({both.whole.version: [jobs[0], jobs[2]]}, [], [])
    assert reports == [2]
    both.keep(3)
    jobs = [both.opened.open(3) for _ in range(4)]
    routed = both.whole.router.route_all(jobs, 0.0)
    assert not routed.running
    assert [(cached.jobs, len(cached.answers)) for cached in routed.cached] == [(jobs, 4)]
    assert reports == [2, 4]


def test_a_revoked_job_of_a_claim_is_refused_though_its_answer_is_here():
    """As soon as any job was revoked, each is looked at."""
    both = Claims(ttl_s=60.0, shares=True, isolates=True, is_paused=False)
    both.keep(3)
    jobs = [both.opened.open(3) for _ in range(3)]
    both.whole.listener.revoked.add(jobs[1].header.id)
    routed = both.whole.router.route_all(jobs, 0.0)
    answers = [route.outcome.answer for _, route in routed.others if isinstance(route, Answered)]
    assert (answers[1], [type(answer) for answer in answers]) == (REVOKED, [EncodedOutputs, Failure, EncodedOutputs])
