"""A worker that takes samples of inputs, and one that asks for the digest of each job: all that differs is the cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.registry.broker.base import CommitStatus, Delivery
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Failure, Options, Retry
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array
from penstock.safety.cache_entry import key_of
from penstock.workers.batch_run import JointAnswers
from penstock.workers.cache import AnswerCache, InputSamples, JobKeys, SingleFlight
from penstock.workers.completer import Completer, NextTry, Rejoin
from penstock.workers.job import ClaimedJob
from penstock.workers.leases import LeasedJobs
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.router import Answered, Aside, JobRouter, Route, Run, Suspect
from penstock.workers.versions.peers import Peers
from penstock.workers.versions.placement import Placement
from tests.workers.claims_of_jobs import UNSIGNED, Kind, Sealer, delivery_of
from tests.workers.doubles import Doubler, counted, lifecycle_of, run_of, spec_of
from tests.workers.test_router import Revocations
from tests.workers.test_shared_headers import Reader

CACHE_S: Final = 50.0
BROKEN: Final = Failure("ModelError", "ValueError: no")
SHARED: Final[dict[str, dict[str, Any]]] = {
    "both": {"cache": {"ttl_seconds": CACHE_S}},
    "equal jobs share": {"cache": {"enabled": False}},
    "answers are cached": {"cache": {"ttl_seconds": CACHE_S}, "batching": {"single_flight": False}},
}


class NeverNew(InputSamples):
    """Samples that tell no inputs apart from earlier ones: the digests decide about each job."""

    def are_new(self, jobs: Sequence[ClaimedJob]) -> bool:
        return False


class KeyByKey(JobKeys):
    """Keys of which nothing is hashed for two jobs together."""

    def begin_all(self, jobs: Sequence[ClaimedJob], label: str) -> None:
        for job in jobs:
            tenant = job.header.tenant if self._isolates_tenants else ""
            job.digest = key_of(job.header, job.body, label, tenant=tenant)


class Worker:
    """The router and the completer of a worker for the model `double`; the test says when its batches run."""

    def __init__(self, *, takes_samples: bool, isolates_tenants: bool, sections: dict[str, Any]) -> None:
        self.now = 100.0
        self.is_paused = False
        config = InferenceConfig.model_validate(sections)
        self.metrics, self.listener, self.leased = InferenceMetrics((1.0,)), Revocations(), LeasedJobs()
        self.flights, self.answers = SingleFlight(), AnswerCache(config.cache, self.clock)
        broker = MemoryBroker(self.clock)
        lifecycle = lifecycle_of(config, [spec_of()], broker, self.metrics, self.clock)
        (self.version,) = lifecycle.turns
        self.version.runtime = Doubler()
        self.version.has_loaded()
        self.reader = Reader(UNSIGNED)
        self.router = JobRouter(
            lifecycle,
            Placement(lifecycle, Peers(broker, "here", self.clock), self.clock, most_waiting=10),
            self.answers,
            self.flights,
            self.listener,
            self.metrics,
            is_paused=lambda _model: self.is_paused,
            preloads=True,
            isolates_tenants=isolates_tenants,
        )
        if not takes_samples:
            self.router._samples = NeverNew(1)
            self.router._keys = KeyByKey(isolates_tenants=isolates_tenants)
        self.completer = Completer(
            "worker-1",
            UNSIGNED,
            lifecycle.models,
            self.leased,
            self.flights,
            self.answers,
            self.listener,
            self.metrics,
            client_tracebacks=False,
            now_ms=lambda: 6500.0,
            clock=self.clock,
            jitter=lambda: 1.0,
        )
        self.waiting: list[ClaimedJob] = []
        """For a batch, in order."""

    def clock(self) -> float:
        return self.now

    # The steps

    def claim(self, deliveries: Sequence[Delivery]) -> None:
        """Jobs come in, as JobTransfers.admit takes them in."""
        self.completer.keep_answers()
        jobs = self.reader.open_all(deliveries, self.now, 6500.0)
        self.leased.take(jobs)
        routed = self.router.route_all(jobs, 6500.0)
        for cached in routed.cached:
            self.completer.add_cached(cached)
        for job, route in routed.others:
            self._put(job, route)
        assert not routed.sought
        for running in routed.running.values():
            self.waiting += running

    def run(self, count: int, failing: int, lost: int) -> None:
        """A batch of the jobs that have waited longest. failing, lost: the numbers of jobs; of none where there are
        fewer."""
        jobs, self.waiting = self.waiting[:count], self.waiting[count:]
        if not jobs:
            return
        run = run_of(self.version, *jobs)
        rows = np.concatenate([job.inputs["x"] for job in jobs])
        run.answers = JointAnswers({"y": rows * 2}, jobs)
        if failing < len(jobs):
            run.answers = [BROKEN if number == failing else each for number, each in enumerate(run.answers)]
        if lost < len(jobs):
            jobs[lost].is_lost = True
        run.started, run.ended = self.now - 1.0, self.now
        self.completer.collect([run])

    def exchange(self, statuses: Sequence[CommitStatus]) -> list[Any]:
        """One round trip; returns what it commits."""
        for retry in self.completer.seal():
            if isinstance(retry, Rejoin):
                self._put(retry.job, self.router.rejoin(retry.job, retry.version))
            else:
                assert isinstance(retry, NextTry)
                self._put(retry.job, self.router.resume(retry.job, retry.version))
        commits = self.completer.commits
        told = [*statuses, *[CommitStatus.COMMITTED] * len(commits)][: len(commits)]
        self.completer.settle(told, self.now)
        return commits

    def give_back(self, count: int) -> None:
        """The jobs that have waited longest go back to the queue, each with its followers."""
        jobs, self.waiting = self.waiting[:count], self.waiting[count:]
        self.leased.drop(self.flights.end_all(jobs))

    def _put(self, job: ClaimedJob, route: Route) -> None:
        if isinstance(route, Answered):
            self.completer.add(route.outcome)
        elif route is not Aside.FOLLOWS:
            assert isinstance(route, Run | Suspect)
            self.waiting.append(job)

    def facts(self) -> dict[str, Any]:
        """What it holds and what it has counted. The digests are asked for: that is the cost."""
        leaders = [*self.flights._leaders.values(), *self.flights._alone]
        followers = {
            leader.header.id: [job.header.id for job, _ in self.flights._followers.get(leader.digest, ())]
            for leader in leaders
        }
        entries = self.answers.memory._entries
        return {
            "waiting": [(job.header.id, job.digest, job.tries) for job in self.waiting],
            "flights": followers,
            "cached": [(key, answer, expires_at) for key, (answer, expires_at, _) in entries.items()],
            "looked up": self.answers._accesses,
            "shared": counted(self.metrics, "penstock_single_flight"),
            "begun": self.listener.begun,
            "memory": (len(self.leased), self.version.queue.in_memory, self.version.queue.in_flight),
            "work": self.completer.has_work,
        }


Step: TypeAlias = tuple[Any, ...]
JOB: Final = st.tuples(
    st.integers(0, 3),
    st.sampled_from(["acme", "acme", "umbrella"]),
    st.sampled_from([1, 1, 1, 2]),
    st.sampled_from([0, 0, 0, 0, 1]),
    st.sampled_from([0, 0, 0, 2]),
)
"""Number, tenant, rows, crashes, and attempts of the retry policy; 0: without one."""
STATUS: Final = st.sampled_from([*[CommitStatus.COMMITTED] * 4, CommitStatus.FENCED, CommitStatus.GONE])
STEP: Final = st.one_of(
    st.tuples(st.just("claim"), st.lists(JOB, min_size=1, max_size=5)),
    st.tuples(st.just("claim"), st.lists(JOB, min_size=1, max_size=3)),
    st.tuples(st.just("run"), st.integers(1, 4), st.integers(0, 12), st.integers(0, 12)),
    st.tuples(st.just("exchange"), st.lists(STATUS, max_size=4)),
    st.tuples(st.just("give back"), st.integers(1, 3)),
    st.tuples(st.just("wait"), st.sampled_from([1.0, CACHE_S])),
    st.tuples(st.just("pause")),
    st.tuples(st.just("forget")),
)


def take(workers: Sequence[Worker], step: Step, claim: Callable[[Sequence[Any]], list[Delivery]]) -> None:
    """Each worker takes this step; all commit the same."""
    what, *how = step
    if what == "claim":
        deliveries = claim(*how)
        for worker in workers:
            worker.claim(deliveries)
    elif what == "exchange":
        first, second = [worker.exchange(*how) for worker in workers]
        assert first == second
    for worker in workers:
        if what == "run":
            worker.run(*how)
        elif what == "give back":
            worker.give_back(*how)
        elif what == "wait":
            worker.now += how[0]
        elif what == "pause":
            worker.is_paused = not worker.is_paused
        elif what == "forget":
            worker.answers.forget(Doubler.content_hash)


def claims() -> Callable[[Sequence[Any]], list[Delivery]]:
    """What makes the deliveries of jobs, each with an entry of its own."""
    sealer, entries = Sealer(UNSIGNED), iter(range(10_000))

    def claim(jobs: Sequence[Any]) -> list[Delivery]:
        deliveries = []
        for number, tenant, rows, crashes, attempts in jobs:
            inputs: dict[str, Array] = {"x": np.full((rows, 1), number, np.float32)}
            options = Options(retry=Retry(attempts=attempts)) if attempts else Options()
            kind = Kind(partial(_same, inputs), header={"tenant": tenant, "options": options})
            deliveries.append(delivery_of(sealer.job(kind), kind, next(entries), crashes=crashes))
        return deliveries

    return claim


def _same(inputs: dict[str, Array], _number: int) -> dict[str, Array]:
    return inputs


FIRST: Final[Step] = ("claim", [(90, "acme", 1, 0, 0), (91, "acme", 1, 0, 0), (92, "acme", 1, 0, 0)])
"""Jobs that are unlike all others."""
LAST: Final[tuple[Step, ...]] = (("run", 99, 99, 99), ("exchange", [])) * 3


@pytest.mark.parametrize("shared", SHARED)
@settings(max_examples=60, derandomize=True)
@given(steps=st.lists(STEP, min_size=2, max_size=14), isolates_tenants=st.booleans())
@example(
    # A job leads without a digest and ends; an equal one comes, and a third one while that runs.
    steps=[("run", 9, 99, 99), ("exchange", []), FIRST, FIRST, ("run", 9, 0, 99), ("exchange", []), FIRST],
    isolates_tenants=True,
)
@example(
    # A job that leads without a digest goes back, and comes again.
    steps=[("give back", 3), FIRST, ("run", 9, 99, 99), FIRST, ("exchange", [])],
    isolates_tenants=True,
)
def test_samples_change_nothing_but_the_cost(steps: list[Step], isolates_tenants: bool, shared: str):
    """In any order of claims, batches, exchanges and returns: equal commits, cached answers, counts, leaders and
    followers."""
    sections = SHARED[shared]
    workers = [
        Worker(takes_samples=takes, isolates_tenants=isolates_tenants, sections=sections) for takes in (True, False)
    ]
    claim = claims()
    take(workers, FIRST, claim)
    sampled, by_digest = workers
    assert [job.known_digest for job in sampled.waiting] == [b""] * 3, "no digest was asked for"
    assert all(job.known_digest for job in by_digest.waiting)
    assert [*sampled.flights._alone] == (sampled.waiting if sampled.version.policy.shares_flights else [])
    for number, step in enumerate([*steps, *LAST]):
        take(workers, step, claim)
        # To look at the facts asks for digests, which must not be there in the next steps of every example.
        if number >= len(steps) - 1:
            assert sampled.facts() == by_digest.facts()
    assert sampled.facts()["memory"] == (0, 0, 0), "each job has had its end"
