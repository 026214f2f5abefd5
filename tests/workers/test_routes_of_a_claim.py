"""A claim that is routed as a whole goes the ways that its jobs go one by one."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry.broker.base import Delivery
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.deployment import DeployedArm, Deployment, Routing
from penstock.registry.envelope import Options
from penstock.registry.package import Package
from penstock.registry.settings_sections import InferenceConfig
from penstock.workers.cache import AnswerCache, SingleFlight
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.results import EncodedOutputs
from penstock.workers.router import Answered, Aside, HandOver, JobRouter, Route, RoutedClaim, Run, Seek, Suspect
from penstock.workers.versions.peers import Peers
from penstock.workers.versions.placement import Placement
from penstock.workers.versions.version import ServedVersion
from tests.workers.cache.stepped_tiers import DictTier, SteppedTiers
from tests.workers.claims_of_jobs import KINDS, UNSIGNED, Kind, Sealer, delivery_of
from tests.workers.doubles import Doubler, counted, lifecycle_of, spec_of
from tests.workers.test_router import Revocations
from tests.workers.test_shared_headers import Reader

NOW_MS: Final = 6500.0
CLAIMED: Final = {
    **{name: KINDS[name] for name in ("plain", "another tenant", "several rows", "several inputs", "texts")},
    **{name: KINDS[name] for name in ("a deadline", "outputs", "retries", "a task", "a version", "a trace")},
    "an unknown output": Kind(header={"options": Options(outputs=("z",))}),
    "an unknown version": Kind(header={"version": "9"}),
    "another model": Kind(slot="triple"),
}
"""Jobs of the models `double` and `triple`, by name."""
ARMS: Final = Routing(
    "of the test",
    "ab",
    (DeployedArm("1", Doubler.content_hash, 0.5), DeployedArm("2", Doubler.content_hash, 0.5)),
)
RECORDS: Final = (
    b"",
    b"1 " + Deployment(1, "double", "2", Doubler.content_hash).seal(),
    b"2 " + Deployment(2, "double", "1", Doubler.content_hash).seal(),
    b"3 " + Deployment(3, "double", "1", Doubler.content_hash, ARMS).seal(),
)
"""Of the active version of `double`: none, version 2, then version 1 again, then both as arms."""
CHANGES: Final[tuple[dict[str, Any], ...]] = (
    *({} for _ in range(5)),
    {"crashes": 1},
    {"exceeded_s": 2.0},
    {"crashes": 1, "exceeded_s": 2.0},
    {"accepted_first_ms": 4499},
    {"accepted_first_ms": 4500},
    {"attempt": 2},
)
"""Of a delivery. A job with a deadline that was first accepted at 4499 ms is expired, one of 4500 ms is not."""
DELIVERED = st.tuples(
    st.one_of(st.just("plain"), st.sampled_from(sorted(CLAIMED))),
    st.sampled_from(range(len(CHANGES))),
    st.sampled_from([0, 0, 0, 1, 2, 3, 3]),
)


class Harness:
    """A router over two models. Of `double` there are the versions 1, which is active, and 2."""

    def __init__(
        self, states: dict[str, bool], *, preloads: bool, revoked: set[str], has_tiers: bool = False, **sections: Any
    ) -> None:
        config = InferenceConfig.model_validate(sections)
        self.broker, self.metrics, self.listener = MemoryBroker(lambda: 100.0), InferenceMetrics((1.0,)), Revocations()
        self.listener.revoked = revoked
        tiers = SteppedTiers(
            [DictTier("l2", lambda: 100.0)],
            isolates_tenants=False,
            may_leave=None,
            timeout_s=1.0,
            ring=lambda: None,
            clock=lambda: 100.0,
        )
        self.answers = AnswerCache(config.cache, lambda: 100.0, tiers if has_tiers else None)
        specs = [spec_of(), spec_of(name="triple")]
        self.lifecycle = lifecycle_of(config, specs, self.broker, self.metrics, lambda: 100.0)
        second = ServedVersion(Package(spec_of(version="2"), Path("nowhere")), config)
        self.lifecycle.models["double"].versions["2"] = second
        self.lifecycle.turns.append(second)
        for version in self.lifecycle.turns:
            if states.get(f"{version.name}/{version.label}", True):
                version.runtime = Doubler()
                version.has_loaded()
        peers = Peers(self.broker, "here", lambda: 100.0)
        self.router = JobRouter(
            self.lifecycle,
            Placement(self.lifecycle, peers, lambda: 100.0, most_waiting=10),
            self.answers,
            SingleFlight(),
            self.listener,
            self.metrics,
            is_paused=lambda _model: False,
            preloads=preloads,
            isolates_tenants=False,
        )

    def facts(self, jobs: list[ClaimedJob]) -> dict[str, Any]:
        """What the routes changed."""
        models = self.lifecycle.models.values()
        return {
            "jobs": [(job.header.id, job.rows, job.digest) for job in jobs],
            "begun": self.listener.begun,
            "shared": counted(self.metrics, "penstock_single_flight"),
            "versions": [(each.name, each.label, each.state) for each in self.lifecycle.turns],
            "active": [(model.name, model.label, model.record, model.decided) for model in models],
        }


def shown(route: Route) -> object:
    """A route, as it can be compared with that of another worker."""
    if isinstance(route, Run | Seek | Suspect):
        return type(route).__name__, route.version.name, route.version.label
    if isinstance(route, Answered):
        outcome = route.outcome
        return outcome.answer, outcome.how, outcome.label
    assert isinstance(route, Aside | HandOver)
    return route


def assert_routed_as_one_by_one(
    deliveries: list[Delivery], revoked: set[int], cached: set[int], **harness: Any
) -> tuple[int, int]:
    """Route a claim as a whole and job by job; returns how many run, and how many needed a look of their own."""
    first = Reader(UNSIGNED).open_all(deliveries, 77.0, NOW_MS)
    ids = {job.header.id for number, job in enumerate(first) if number in revoked}
    together, alone = Harness(revoked=ids, **harness), Harness(revoked=ids, **harness)
    jobs, again = first, Reader(UNSIGNED).open_all(deliveries, 77.0, NOW_MS)
    for each, known in ((together, jobs), (alone, again)):
        keep_answers(each, [job for number, job in enumerate(known) if number in cached])
    looks = 0
    look = together.router.route

    def counted_look(job: ClaimedJob, broker_now: float) -> Route:
        nonlocal looks
        looks += 1
        return look(job, broker_now)

    together.router.route = counted_look  # type: ignore[method-assign]  # it counts
    running, sought, cached_answers, others = together.router.route_all(jobs, NOW_MS)
    expected = [(job.header.id, shown(alone.router.route(job, NOW_MS))) for job in again]
    found = {job.header.id: shown(Run(version)) for version, of_version in running.items() for job in of_version}
    found |= {job.header.id: shown(Seek(version)) for version, of_version in sought.items() for job in of_version}
    others += [(outcome.job, Answered(outcome)) for each in cached_answers for outcome in each.outcomes()]
    assert not found.keys() & {job.header.id for job, _ in others}
    assert found | {job.header.id: shown(route) for job, route in others} == dict(expected)
    assert together.facts(jobs) == alone.facts(again)
    order = {job.header.id: number for number, job in enumerate(jobs)}
    for some in (*running.values(), *sought.values(), [job for job, _ in others]):
        numbers = [order[job.header.id] for job in some]
        assert numbers == sorted(numbers), "the jobs of one way stay in their order"
    return len(found), looks


def keep_answers(harness: Harness, jobs: list[ClaimedJob]) -> None:
    """The cache has answers for these jobs."""
    for job in jobs:
        version = harness.lifecycle.models[job.delivery.slot].active
        if version is not None and version.policy.cache_ttl_s and not job.is_suspect:
            harness.router.route(job, 0.0)
            if job.digest:
                answer = EncodedOutputs((), b"", version.content_hash, version.generation)
                harness.answers.memory.put(job.digest, answer, 60.0)


@pytest.mark.parametrize(
    "sections",
    [
        {"batching": {"single_flight": False}, "cache": {"enabled": False}},
        {"batching": {"single_flight": True}, "cache": {"enabled": False}},
        {"batching": {"single_flight": False}, "cache": {"enabled": True}},
        {"batching": {"single_flight": True}, "cache": {"enabled": True}, "has_tiers": True},
    ],
    ids=["each runs", "equal jobs share", "answers are cached", "tiers are asked"],
)
@settings(max_examples=40, derandomize=True)
@given(
    delivered=st.lists(DELIVERED, min_size=1, max_size=10),
    revoked=st.sets(st.integers(0, 9), max_size=1),
    cached=st.sets(st.integers(0, 9), max_size=2),
    states=st.fixed_dictionaries({"double/1": st.booleans(), "double/2": st.booleans(), "triple/1": st.just(True)}),
    preloads=st.booleans(),
)
def test_a_claim_is_routed_as_one_by_one(
    delivered: list[tuple[str, int, int]],
    revoked: set[int],
    cached: set[int],
    states: dict[str, bool],
    preloads: bool,
    sections: dict[str, Any],
):
    """Of all kinds of jobs, in all states of the versions; a record of the active version may change in the middle."""
    sealer, deliveries = Sealer(UNSIGNED), []
    for number, (name, change, record) in enumerate([("plain", 0, 0), *delivered]):
        kind = CLAIMED[name]
        active = RECORDS[record] if kind.slot == "double" else b""
        changes = {**CHANGES[change], "active": active}
        deliveries.append(delivery_of(sealer.job(kind), kind, number, **changes))
    assert_routed_as_one_by_one(deliveries, revoked, cached, states=states, preloads=preloads, **sections)


EACH_RUNS: Final[dict[str, Any]] = {"batching": {"single_flight": False}, "cache": {"enabled": False}}


def claim_of(kinds: list[str], active: list[bytes] | None = None) -> list[Delivery]:
    """A claim of these jobs; `active`: the record that each of them carries."""
    sealer = Sealer(UNSIGNED)
    return [
        delivery_of(sealer.job(CLAIMED[kind]), CLAIMED[kind], number, active=active[number] if active else b"")
        for number, kind in enumerate(kinds)
    ]


def test_one_look_is_enough_for_the_plain_jobs_of_a_model():
    """The first job is checked against the signature, the other nineteen are not looked at by themselves."""
    kinds = ["plain", "another tenant"] * 10
    assert assert_routed_as_one_by_one(claim_of(kinds), set(), set(), states={}, preloads=True, **EACH_RUNS) == (20, 1)


def test_a_new_record_in_the_middle_of_a_claim_holds_from_its_job_on():
    """One look follows the record, and the version that it names is looked at for the jobs behind."""
    active = [RECORDS[0]] * 4 + [RECORDS[1]] * 4 + [RECORDS[2]] * 4
    routed = assert_routed_as_one_by_one(
        claim_of(["plain"] * 12, active), set(), set(), states={}, preloads=True, **EACH_RUNS
    )
    # One for each record, and one for the first job of the second version.
    assert routed == (12, 3)


@pytest.mark.parametrize(
    "sections",
    [{"cache": {"enabled": False}}, {"batching": {"single_flight": False}}],
    ids=["equal jobs share", "cached"],
)
def test_plain_jobs_of_a_version_that_shares_answers_need_no_look_of_their_own(sections: dict[str, Any]):
    """All but the first, whose description is not known yet. While a monitor has revoked any job, each is looked at."""
    deliveries = claim_of(["plain"] * 5)
    assert assert_routed_as_one_by_one(deliveries, set(), set(), states={}, preloads=True, **sections)[1] == 1
    assert assert_routed_as_one_by_one(deliveries, {4}, set(), states={}, preloads=True, **EACH_RUNS) == (4, 5)


@pytest.mark.parametrize("name", sorted(CLAIMED))
@pytest.mark.parametrize("change", CHANGES[4:], ids=str)
def test_a_job_among_plain_ones_goes_its_own_way(name: str, change: dict[str, Any]):
    """The others of its claim go on as they would without it."""
    kinds = ["plain", name, "plain", name, "plain"]
    deliveries = claim_of(kinds)
    deliveries[3] = structs.replace(deliveries[3], **change)
    assert_routed_as_one_by_one(deliveries, set(), set(), states={}, preloads=True, **EACH_RUNS)


def test_a_version_that_was_unloaded_gets_no_plain_jobs():
    """Its jobs go back while it is loaded once more, also those whose description it knows."""
    harness = Harness({}, preloads=True, revoked=set(), **EACH_RUNS)
    jobs = Reader(UNSIGNED).open_all(claim_of(["plain"] * 4), 77.0, NOW_MS)
    version = harness.lifecycle.models["double"].active
    assert version is not None
    assert harness.router.route_all(jobs[:2], NOW_MS) == RoutedClaim(
        defaultdict(list, {version: jobs[:2]}), defaultdict(list), [], []
    )
    version.unload()
    given_back: list[tuple[ClaimedJob, Route]] = [(job, Aside.GIVE_BACK) for job in jobs[2:]]
    assert harness.router.route_all(jobs[2:], NOW_MS) == RoutedClaim(
        defaultdict(list), defaultdict(list), [], given_back
    )
