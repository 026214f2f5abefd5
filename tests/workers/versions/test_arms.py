"""Experiments at the claim: each job that names no version is answered by the version of its arm. AR-085, AR-086."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.admission import SubmitOptions
from penstock.registry.broker.base import State
from penstock.registry.broker.breakers import (
    CANDIDATE,
    BreakerLimits,
    BreakerReading,
    BreakerRecord,
    breaker_name,
    new_breaker_id,
)
from penstock.registry.deployment import DeployedArm, Deployment, Routing
from penstock.registry.envelope import Retry, open_result
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.package import load_package
from penstock.safety.arm_figures import ArmFigures, read_observations
from penstock.safety.breaker import MAX_COPY_AGE_S, MemoryBreakers
from penstock.safety.orchestrator import Subject
from penstock.safety.routing import Arm, RoutingTable
from penstock.workers.levels import shared_breakers
from penstock.workers.versions import peers
from penstock.workers.versions.repository import DiskRepository
from tests.packages import write_package
from tests.servers import wait_until
from tests.workers.stepped import LIMITS, UNSIGNED, SteppedHarness, SteppedWorker, open_harness

MODEL = "shared"
EXPERIMENT = "rollout-1"
TIMES = """
def build():
    def forward(inputs):
        if (inputs["x"] < 0).any():
            raise ValueError("negative")
        return {{"y": inputs["x"] * {factor}}}

    return forward
"""


FAILS = """
def build():
    def forward(inputs):
        if (inputs["x"] > 4).any():
            raise ConnectionError("a service is away")
        return {"y": inputs["x"] * 10}

    return forward
"""


RAISES = """
def build():
    def forward(inputs):
        if inputs["x"].any():
            raise ValueError("wrong")
        return {"y": inputs["x"]}

    return forward
"""


class _Breakers(MemoryBreakers):
    """Breakers whose broker can be away."""

    is_away = False

    def breakers(self, model: str) -> BreakerReading:
        if self.is_away:
            raise BrokerUnavailable("away")
        return super().breakers(model)


class Site:
    """Versions 1 (x) and 2 (10 x) of a model, and workers whose loads run on threads of their own."""

    def __init__(self, root: Path, harness: SteppedHarness) -> None:
        self.root = root
        self.harness = harness
        self.hashes = {label: load_package(root / MODEL / label).manifest().content_hash for label in ("1", "2")}
        self.breakers = _Breakers(lambda: int(harness.now * 1000))
        self._epoch = 0

    def start(self, root: Path | None = None, **options: Any) -> SteppedWorker:
        root = root or self.root
        return self.harness.start_worker(repository=DiskRepository(root, [root]), breakers=self.breakers, **options)

    def rewrite(self, label: str, source: str) -> None:
        """The version has this source from now on."""
        (self.root / MODEL / label / "model.py").write_text(source)
        self.hashes[label] = load_package(self.root / MODEL / label).manifest().content_hash

    def activate(self, weights: dict[str, float] | None = None, *, version: str = "1", **routing: Any) -> int:
        """The next decision: `version` is active, and arms with these weights share the jobs."""
        self._epoch += 1
        arms = tuple(DeployedArm(label, self.hashes[label], weight) for label, weight in (weights or {}).items())
        shared = Routing(EXPERIMENT, "ab", arms, **routing) if arms else None
        record = Deployment(self._epoch, MODEL, version, self.hashes[version], shared).seal()
        spec = load_package(self.root / MODEL / version).spec.to_json()
        assert self.harness.broker.activate(MODEL, self._epoch, record, version, spec)
        return self._epoch

    def await_loaded(self, worker: SteppedWorker, label: str = "2") -> None:
        """Jobs of both arms have come to the worker, which has loaded what they need."""

        def is_loaded() -> bool:
            worker.turn()
            version = worker.drain.lifecycle.models[MODEL].versions.get(label)
            return version is not None and version.is_ready

        worker.drain.lifecycle.request_load(MODEL, label)
        wait_until(is_loaded, 10, f"version {label} is loaded")

    def run(self, worker: SteppedWorker, job_ids: list[str]) -> None:
        """Turns until these jobs have ended; the clock goes on, because waiting jobs are looked at by time."""

        def have_ended() -> bool:
            self.harness.now += 0.25
            if worker.drain.parts.arm_breakers is not None:
                self.read_breakers(worker)
            worker.forwards()
            return all(self.harness.state(job_id) is not State.QUEUED for job_id in job_ids)

        wait_until(have_ended, 10, "the jobs have ended")

    def version_of(self, job_id: str) -> str:
        """The version in the result, after the content hash and the value were compared with it."""
        header, _ = open_result(self.harness.job_record(job_id).result, UNSIGNED)
        assert header.error is None, header.error
        assert header.content_hash == self.hashes[header.version]
        return header.version

    def stop_arm(self, worker: SteppedWorker, label: str = "2") -> None:
        """The breaker of this version opens, and the worker reads it."""
        name = breaker_name(MODEL, label, CANDIDATE)
        self.breakers.force_open_breaker(name, "the canary says FAIL", new_breaker_id(), BreakerLimits())
        self.read_breakers(worker)

    def publish_named(self, number: float, version: str) -> str:
        """A job that names a version; its id."""
        spec = load_package(self.root / MODEL / version).spec
        job = self.harness._builder.build(spec, {"x": [[number, 0, 0, 0]]}, SubmitOptions(version=version))
        (receipt,) = self.harness.broker.publish(MODEL, [job], LIMITS)
        assert receipt.outcome == "accepted"
        return job.job_id

    def read_breakers(self, worker: SteppedWorker) -> bool:
        """One reading of the thread that reads them."""
        assert worker.drain.parts.arm_breakers is not None
        return worker.drain.parts.arm_breakers.shared.turn()

    def answered_by(self, worker: SteppedWorker, *numbers: float, **how: Any) -> set[str]:
        """The versions that answer such jobs."""
        jobs = self.harness.publish(MODEL, *numbers, **how)
        self.run(worker, jobs)
        return {self.version_of(job_id) for job_id in jobs}

    def figures(self, worker: SteppedWorker) -> dict[int, dict[str, ArmFigures]]:
        """What the workers have written, after a report of this one. Jobs are counted in the turn behind their own."""
        worker.turn()
        worker.drain.parts.status.report(is_ready=True)
        return read_observations(self.harness.broker.observations(MODEL, EXPERIMENT))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(peers, "_LOOK_EVERY_S", 0.0)
    root = tmp_path / "models"
    for version, factor in (("1", 1), ("2", 10)):
        write_package(root, MODEL, TIMES.format(factor=factor), version=version)
    for harness in open_harness(root):
        yield Site(root, harness)


def table(weights: dict[str, float], *, is_sticky: bool = False) -> RoutingTable:
    return RoutingTable(tuple(Arm(*arm) for arm in weights.items()), EXPERIMENT, is_sticky)


def test_each_job_is_answered_by_the_version_of_its_arm(site: Site):
    """The assignment is the pure one: any process can tell the version from the id of the job."""
    weights = {"1": 0.7, "2": 0.3}
    site.activate(weights)
    worker = site.start()
    site.await_loaded(worker)
    jobs = site.harness.publish(MODEL, *range(1, 201))
    site.run(worker, jobs)
    expected = table(weights)
    answered = [site.version_of(job_id) for job_id in jobs]
    assert answered == [expected.version_for(job_id) for job_id in jobs]
    assert 30 <= answered.count("2") <= 90
    for number, (job_id, version) in enumerate(zip(jobs, answered, strict=True), 1):
        assert site.harness.answer(job_id) == number * (10 if version == "2" else 1)


def test_change_of_the_shares_holds_from_the_next_claim_on(site: Site):
    """A larger share keeps the jobs of the smaller one, and the end of the experiment gives all to production."""
    worker = site.start()
    site.activate({"2": 0.0, "1": 1.0})
    site.await_loaded(worker)
    for weights, expected in (({"2": 0.0, "1": 1.0}, {"1"}), ({"2": 1.0, "1": 0.0}, {"2"}), (None, {"1"})):
        site.activate(weights)
        jobs = site.harness.publish(MODEL, *range(20))
        site.run(worker, jobs)
        assert {site.version_of(job_id) for job_id in jobs} == expected


def test_shares_are_metrics(site: Site):
    """A gauge for each arm; after the end the active version has all jobs."""
    worker = site.start()

    def shares() -> dict[str, float]:
        (family,) = [each for each in worker.metrics.collect() if each.name == "penstock_traffic_share"]
        return {sample.labels["model_version"]: sample.value for sample in family.samples}

    for weights, expected in (
        (None, {}),
        ({"2": 0.25, "1": 0.75}, {"1": 0.75, "2": 0.25}),
        (None, {"1": 1.0, "2": 0.0}),
    ):
        site.activate(weights)
        worker.drain.lifecycle.poll_records()
        worker.turn()
        assert shares() == expected


def test_job_that_names_a_version_gets_it(site: Site):
    """Whatever the experiment says; it is not counted either."""
    site.activate({"2": 1.0, "1": 0.0})
    worker = site.start()
    site.await_loaded(worker)
    (job_id,) = site.harness.publish(MODEL, 3.0, version="1")
    site.run(worker, [job_id])
    assert site.version_of(job_id) == "1"
    assert site.figures(worker) == {}


def test_sticky_key_decides_and_else_the_tenant(site: Site):
    """AR-086: all jobs of one key have one version; jobs without a key have the one of their tenant."""
    weights = {"1": 0.5, "2": 0.5}
    site.activate(weights, is_sticky=True)
    worker = site.start()
    site.await_loaded(worker)
    expected = table(weights, is_sticky=True)
    for key in ("anna", "ben", "carla", "dan"):
        jobs = site.harness.publish(MODEL, *range(6), sticky_key=key)
        site.run(worker, jobs)
        assert {site.version_of(job_id) for job_id in jobs} == {expected.version_for(key)}
    jobs = site.harness.publish(MODEL, *range(100, 106))
    site.run(worker, jobs)
    assert {site.version_of(job_id) for job_id in jobs} == {expected.version_for("acme")}


def test_job_waits_while_its_arm_is_loading(site: Site):
    """The first job of an arm that is not in memory begins its load; no other version answers the job."""
    site.activate({"2": 1.0, "1": 0.0})
    worker = site.start()
    model = worker.drain.lifecycle.models[MODEL]
    (job_id,) = site.harness.publish(MODEL, 3.0)
    worker.turn()
    assert model.arms is not None
    assert model.arms.versions["2"] is not None
    site.run(worker, [job_id])
    assert (site.version_of(job_id), site.harness.answer(job_id)) == ("2", 30.0)


def test_job_goes_to_the_worker_that_has_its_arm(site: Site):
    """A worker without the files of an arm hands its jobs over and answers those of the other arm."""
    elsewhere = site.root.parent / "elsewhere"
    shutil.copytree(site.root, elsewhere)
    shutil.rmtree(elsewhere / MODEL / "2")
    site.activate({"2": 0.5, "1": 0.5})
    without, having = site.start(elsewhere), site.start()
    site.await_loaded(having)
    jobs = site.harness.publish(MODEL, *range(1, 41))
    without.turn(3)
    assert {site.harness.job_record(job_id).holder for job_id in jobs} != {""}

    def have_ended() -> bool:
        site.harness.pass_time(0.25)
        # A stepped drain counts as not started, and peers hear of ready workers only.
        having.drain.parts.status.report(is_ready=True)
        without.forwards()
        having.forwards()
        return all(site.harness.state(job_id) is not State.QUEUED for job_id in jobs)

    wait_until(have_ended, 20, "both workers have answered")
    expected = table({"2": 0.5, "1": 0.5})
    assert [site.version_of(job_id) for job_id in jobs] == [expected.version_for(job_id) for job_id in jobs]
    workers = {open_result(site.harness.job_record(job_id).result, UNSIGNED)[0].worker for job_id in jobs}
    assert workers == {without.drain.name, having.drain.name}


def test_job_of_an_arm_that_no_worker_has_is_not_failed(site: Site):
    """It goes back to the queue again and again; once the experiment has ended, production answers it."""
    elsewhere = site.root.parent / "elsewhere"
    shutil.copytree(site.root, elsewhere)
    shutil.rmtree(elsewhere / MODEL / "2")
    site.activate({"2": 1.0, "1": 0.0})
    worker = site.start(elsewhere)
    jobs = site.harness.publish(MODEL, 1.0, 2.0)
    worker.turn(3)
    site.harness.pass_time(12.0)
    worker.forwards()
    assert {site.harness.state(job_id) for job_id in jobs} == {State.QUEUED}
    assert worker.notes.ends == []
    site.activate()

    def have_ended() -> bool:
        site.harness.pass_time(0.5)
        worker.forwards()
        return all(site.harness.state(job_id) is not State.QUEUED for job_id in jobs)

    wait_until(have_ended, 20, "production has answered")
    assert [site.version_of(job_id) for job_id in jobs] == ["1", "1"]


def test_other_content_under_the_label_of_an_arm_answers_nothing(site: Site):
    """An arm is its content: a worker whose files differ does not have it."""
    elsewhere = site.root.parent / "elsewhere"
    shutil.copytree(site.root, elsewhere)
    (elsewhere / MODEL / "2" / "model.py").write_text(TIMES.format(factor=99))
    site.activate({"2": 1.0, "1": 0.0})
    worker = site.start(elsewhere)
    (job_id,) = site.harness.publish(MODEL, 1.0)

    def has_tried() -> bool:
        worker.turn()
        version = worker.drain.lifecycle.models[MODEL].versions.get("2")
        return version is not None and bool(version.problem)

    wait_until(has_tried, 10, "the load was tried")
    site.harness.pass_time(6.0)
    worker.forwards()
    assert site.harness.state(job_id) is State.QUEUED


def test_arms_share_neither_cached_answers_nor_a_flight(site: Site):
    """Equal jobs of two arms are two forwards; equal jobs of one arm are one."""
    weights = {"1": 0.5, "2": 0.5}
    site.activate(weights)
    worker = site.start()
    site.await_loaded(worker)
    jobs = site.harness.publish(MODEL, *[7.0] * 40)
    site.run(worker, jobs)
    again = site.harness.publish(MODEL, *[7.0] * 40)
    site.run(worker, again)
    expected = table(weights)
    for job_id in (*jobs, *again):
        version = expected.version_for(job_id)
        assert (site.version_of(job_id), site.harness.answer(job_id)) == (version, 70.0 if version == "2" else 7.0)
    assert {label: arm.jobs for label, arm in site.figures(worker)[1].items()} == {
        label: sum(expected.version_for(job_id) == label for job_id in (*jobs, *again)) for label in weights
    }
    assert min(arm.cached for arm in site.figures(worker)[1].values()) > 0


def test_worker_counts_what_each_arm_did(site: Site):
    """AR-085: jobs, errors among them, cached answers, and a latency for each forward; a new epoch counts afresh."""
    weights = {"1": 0.5, "2": 0.5}
    first = site.activate(weights)
    worker = site.start()
    site.await_loaded(worker)
    good = site.harness.publish(MODEL, *range(1, 31))
    site.run(worker, good)
    # Five failures could stop an arm that had few other jobs: the ids of the jobs decide how they are shared.
    bad = site.harness.publish(MODEL, *(-float(number) for number in range(1, 5)))
    site.run(worker, bad)
    assert {site.harness.state(job_id) for job_id in bad} == {State.FAILED}
    expected = table(weights)
    for _ in range(2):
        found = site.figures(worker)
        assert set(found) == {first}
        for label in ("1", "2"):
            figures = found[first][label]
            answered = sum(expected.version_for(job_id) == label for job_id in good)
            failed = sum(expected.version_for(job_id) == label for job_id in bad)
            assert (figures.jobs, figures.errors, figures.latency_s.count) == (answered + failed, failed, answered)
    second = site.activate({"1": 0.0, "2": 1.0})
    site.run(worker, site.harness.publish(MODEL, 50.0))
    site.run(worker, site.harness.publish(MODEL, 50.0))
    found = site.figures(worker)
    assert (found[second]["2"].jobs, found[second]["2"].cached, found[second]["2"].latency_s.count) == (2, 1, 1)
    assert found[first]["1"].jobs + found[first]["2"].jobs == 34


@pytest.mark.parametrize("fate", ["hangs", "kills its process"])
def test_candidate_that_ends_its_process_has_errors(site: Site, fate: str):
    """The worker that ends the job has not run it, and counts it for the arm of its id."""
    epoch = site.activate({"2": 1.0, "1": 0.0})
    (job_id,) = site.harness.publish(MODEL, 1.0)
    for _ in range(1 if fate == "hangs" else 3):
        worker = site.start()
        site.await_loaded(worker)

        def has_begun(worker: SteppedWorker = worker) -> bool:
            site.harness.pass_time(0.5)
            return worker.begin() is not None

        wait_until(has_begun, 20, "the forward has begun")
        site.harness.crash(worker, over_limit=fate == "hangs")
    last = site.start()
    site.await_loaded(last)

    def has_ended() -> bool:
        site.harness.pass_time(0.5)
        last.forwards()
        return site.harness.state(job_id) is not State.QUEUED

    wait_until(has_ended, 20, "the job has ended")
    assert site.harness.answer(job_id) == ("ForwardTimeout" if fate == "hangs" else "DeadLettered")
    figures = site.figures(last)[epoch]["2"]
    assert (figures.jobs, figures.errors) == (1, 1)


def test_totals_that_were_not_written_are_written_later(site: Site):
    """A report that fails loses no count."""
    epoch = site.activate({"2": 1.0, "1": 0.0})
    worker = site.start()
    site.await_loaded(worker)
    site.run(worker, site.harness.publish(MODEL, 1.0, 2.0))
    site.activate({"2": 0.0, "1": 1.0})
    site.run(worker, site.harness.publish(MODEL, 3.0))
    found = site.figures(worker)
    assert {each: {label: arm.jobs for label, arm in arms.items()} for each, arms in found.items()} == {
        epoch: {"2": 2},
        epoch + 1: {"1": 1},
    }


def test_arm_stays_in_memory_until_the_experiment_has_ended(site: Site):
    """An operator's request to unload it takes effect with the end of the experiment."""
    site.activate({"2": 0.5, "1": 0.5})
    worker = site.start()
    site.await_loaded(worker)
    worker.drain.lifecycle.request_unload(MODEL, "2")
    worker.turn(3)
    version = worker.drain.lifecycle.models[MODEL].versions["2"]
    assert version.is_ready
    site.activate()
    site.run(worker, site.harness.publish(MODEL, 1.0))
    worker.turn(3)
    assert not version.is_ready


@pytest.mark.parametrize("weights", [{"1": 0.5, "2": 0.6}, {"1": 2.0, "2": -1.0}, {"2": 0.5}])
def test_arms_that_divide_no_traffic_are_refused(site: Site, weights: dict[str, float], caplog):
    """The decision before stays in force, and the log names the reason."""
    worker = site.start()
    site.activate()
    site.run(worker, site.harness.publish(MODEL, 1.0))
    site.activate(weights)
    jobs = site.harness.publish(MODEL, *range(2, 12))
    site.run(worker, jobs)
    assert {site.version_of(job_id) for job_id in jobs} == {"1"}
    assert "the record of the active version is refused" in caplog.text


@pytest.mark.parametrize("weights", [{"2": 1.0, "1": 0.0}, {"1": 0.5, "2": 0.5}], ids=["rollout", "ab"])
def test_arm_with_an_open_breaker_gets_no_jobs(site: Site, weights: dict[str, float]):
    """AR-064: no driver acts and the record stays; the version in production answers from the next claim on."""
    site.activate(weights)
    worker = site.start()
    site.await_loaded(worker)
    site.read_breakers(worker)
    numbers = [float(number) for number in range(1, 31)]
    before = site.answered_by(worker, *numbers)
    assert "2" in before
    site.stop_arm(worker)
    assert site.answered_by(worker, *numbers) == {"1"}
    assert site.answered_by(worker, *numbers, sticky_key="anna") == {"1"}
    site.breakers.reset_breaker(breaker_name(MODEL, "2", CANDIDATE))
    site.read_breakers(worker)
    assert "2" in site.answered_by(worker, *numbers)


def test_second_experiment_does_not_remember_the_breaker_of_the_first(site: Site):
    """While the model had no arms, nobody read its breakers, and an operator has reset that of the version."""
    site.activate({"2": 1.0, "1": 0.0})
    worker = site.start()
    site.await_loaded(worker)
    site.stop_arm(worker)
    assert site.answered_by(worker, 1.0) == {"1"}
    site.activate()
    assert site.answered_by(worker, 2.0) == {"1"}
    site.read_breakers(worker)
    site.breakers.reset_breaker(breaker_name(MODEL, "2", CANDIDATE))
    site.activate({"2": 1.0, "1": 0.0})
    assert site.answered_by(worker, 3.0) == {"2"}
    site.stop_arm(worker)
    assert site.answered_by(worker, 4.0) == {"1"}


def test_breakers_of_a_new_arm_are_read_at_once(site: Site, monkeypatch: pytest.MonkeyPatch):
    """The first job of an experiment wakes the thread that reads them, which would sleep for long."""
    monkeypatch.setattr(shared_breakers, "READ_EVERY_S", 3600.0)
    worker = site.start()
    site.await_loaded(worker)
    arm_breakers = worker.drain.parts.arm_breakers
    assert arm_breakers is not None
    arm_breakers.shared.start()
    try:
        name = breaker_name(MODEL, "2", CANDIDATE)
        site.breakers.force_open_breaker(name, "the canary says FAIL", new_breaker_id(), BreakerLimits())
        site.activate({"2": 1.0, "1": 0.0})
        site.harness.publish(MODEL, 1.0)
        worker.turn(2)
        wait_until(lambda: not arm_breakers.admits(MODEL, "2"), 10, "the breaker is read")
    finally:
        arm_breakers.shared.stop()


def test_other_arm_keeps_its_jobs(site: Site):
    """Only the jobs of the stopped version go to the one in production, which is no candidate of its own."""
    write_package(site.root, MODEL, TIMES.format(factor=100), version="3")
    site.hashes["3"] = load_package(site.root / MODEL / "3").manifest().content_hash
    weights = {"1": 0.2, "2": 0.4, "3": 0.4}
    site.activate(weights)
    worker = site.start()
    site.await_loaded(worker)
    site.await_loaded(worker, "3")
    site.stop_arm(worker)
    site.stop_arm(worker, "1")
    jobs = site.harness.publish(MODEL, *range(1, 61))
    site.run(worker, jobs)
    expected = [table(weights).version_for(job_id) for job_id in jobs]
    assert [site.version_of(job_id) for job_id in jobs] == ["1" if label == "2" else label for label in expected]
    assert set(expected) == {"1", "2", "3"}


def test_jobs_that_wait_for_a_stopped_arm_leave_it(site: Site):
    """The forward under way ends; every other job in memory, in a formed batch or not, goes to production."""
    site.activate({"2": 1.0, "1": 0.0})
    worker = site.start()
    site.await_loaded(worker)
    site.read_breakers(worker)
    jobs = site.harness.publish(MODEL, *range(1, 201))
    under_way = worker.begin_next()
    worker.turn(3)
    waiting = worker.drain.reserved()
    assert len(waiting) > 0
    site.stop_arm(worker)
    worker.end(under_way)
    site.run(worker, jobs)
    begun = {item.job.header.id for item in under_way.batch.items}
    assert 0 < len(begun) < len(jobs)
    assert {site.version_of(job_id) for job_id in begun} == {"2"}
    assert {site.version_of(job_id) for job_id in jobs if job_id not in begun} == {"1"}
    assert {header.id for header in waiting} - begun


def test_job_that_names_a_stopped_version_gets_it(site: Site):
    """Its client has asked for it: also where it waits beside jobs of the experiment."""
    site.activate({"2": 1.0, "1": 0.0})
    worker = site.start()
    site.await_loaded(worker)
    named = [site.publish_named(3.0, "2")]
    others = site.harness.publish(MODEL, 4.0)
    worker.turn(2)
    site.stop_arm(worker)
    site.run(worker, [*named, *others])
    assert [site.version_of(job_id) for job_id in (*named, *others)] == ["2", "1"]


def test_next_try_of_a_job_leaves_a_stopped_arm(site: Site):
    """Between two tries the breaker opened: the next one is made by the version in production."""
    site.rewrite("2", FAILS)
    site.activate({"2": 1.0, "1": 0.0})
    worker = site.start()
    site.await_loaded(worker)
    (job_id,) = site.harness.publish(MODEL, 5.0, retry=Retry(attempts=3, backoff_s=1, longest_s=1))
    worker.forward()
    assert worker.notes.retries == [job_id]
    site.stop_arm(worker)
    site.run(worker, [job_id])
    assert site.version_of(job_id) == "1"


def test_candidates_are_not_trusted_while_breakers_cannot_be_read(site: Site):
    """For a second the last reading holds; then the version in production answers, until there is a new one."""
    site.activate({"2": 1.0, "1": 0.0})
    worker = site.start()
    site.await_loaded(worker)
    site.read_breakers(worker)
    site.breakers.is_away = True
    assert not site.read_breakers(worker)
    arms = worker.drain.lifecycle.models[MODEL].arms
    assert arms is not None
    assert arms.admits("2")
    site.harness.now += MAX_COPY_AGE_S + 0.01
    assert not arms.admits("2")
    assert site.answered_by(worker, 1.0, 2.0) == {"1"}
    site.breakers.is_away = False
    assert site.read_breakers(worker)
    assert site.answered_by(worker, 1.0, 2.0) == {"2"}


def test_share_of_a_stopped_arm_is_zero_in_the_metrics(site: Site):
    """With the state of its breaker; the share of production grows by it."""
    site.activate({"2": 0.25, "1": 0.75})
    worker = site.start()
    site.await_loaded(worker)

    def shown(metric: str) -> dict[str, float]:
        (family,) = [each for each in worker.metrics.collect() if each.name == metric]
        return {sample.labels["model_version"]: sample.value for sample in family.samples}

    site.stop_arm(worker)
    worker.turn()
    assert shown("penstock_traffic_share") == {"1": 1.0, "2": 0.0}
    assert shown("penstock_breaker_open") == {"2": 1.0}
    site.breakers.reset_breaker(breaker_name(MODEL, "2", CANDIDATE))
    site.read_breakers(worker)
    worker.turn()
    assert shown("penstock_traffic_share") == {"1": 0.75, "2": 0.25}
    assert shown("penstock_breaker_open") == {"2": 0.0}


def _ended(site: Site, worker: SteppedWorker, count: int, number: float = 1.0) -> list[State]:
    """The states of so many jobs, after their end."""
    jobs = site.harness.publish(MODEL, *[number] * count)
    site.run(worker, jobs)
    return [site.harness.state(job_id) for job_id in jobs]


@pytest.mark.parametrize("weights", [{"2": 1.0, "1": 0.0}, {"2": 0.5, "1": 0.5}], ids=["rollout", "ab"])
def test_arm_whose_jobs_fail_is_stopped_without_a_driver(site: Site, weights: dict[str, float]):
    """AR-064: the worker opens its breaker, and tells that once; production answers from the next claim on."""
    site.rewrite("2", RAISES)
    site.activate(weights)
    told: list[tuple[Subject, BreakerRecord]] = []
    worker = site.start(on_arm_stopped=lambda subject, record: told.append((subject, record)))
    site.await_loaded(worker)
    site.read_breakers(worker)
    failed = 0
    for _ in range(40):
        failed += _ended(site, worker, 1).count(State.FAILED)
        if failed == 5:
            break
    name = breaker_name(MODEL, "2", CANDIDATE)
    assert _ended(site, worker, 40) == [State.COMPLETED] * 40
    site.harness.suspend(worker)
    other = site.start()
    site.await_loaded(other)
    site.read_breakers(other)
    assert _ended(site, other, 40) == [State.COMPLETED] * 40
    assert [each for each, _ in told] == [Subject(MODEL, "2", site.hashes["2"])]
    record = site.breakers.breakers(MODEL).records[name]
    assert record == told[0][1]
    assert record.reason.startswith(f"5 of {5} jobs failed within 60 s; of version 1, 0 of ")
    assert record.retry_ms - record.opened_ms == 300_000


def test_inputs_that_fail_on_every_version_stop_no_arm(site: Site):
    """A client sends what no version can answer: that says nothing about the candidate."""
    site.activate({"2": 0.5, "1": 0.5})
    worker = site.start()
    site.await_loaded(worker)
    site.read_breakers(worker)
    # Production has failed before the candidate has failed five times: the assignment is by the id of the job.
    states = [state for _ in range(60) for state in _ended(site, worker, 1, -1.0)]
    assert states == [State.FAILED] * 60
    assert "2" in site.answered_by(worker, *map(float, range(1, 31)))
    assert site.breakers.breakers(MODEL).records == {}
