"""The drain in this process, over the broker in memory and a real Redis: everything but Celery."""

from __future__ import annotations

import itertools
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.base import (
    Broker,
    Claim,
    Commit,
    CommitStatus,
    Delivery,
    Limits,
    Publication,
    State,
)
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Keyring, ResultHeader, open_result
from penstock.registry.errors import ConfigurationError
from penstock.registry.package import find, load_package
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.settings import Settings
from penstock.registry.tensors import decode
from penstock.workers.assembly import DrainOptions, build_drain
from penstock.workers.batch_run import BatchRun
from penstock.workers.drain import Drain
from penstock.workers.observe.listener import NullListener
from penstock.workers.observe.metrics import InferenceMetrics
from tests.flow.conftest import amend
from tests.packages import recorded_forwards, write_double, write_package, write_raiser, write_recorder
from tests.servers import ROOT, RedisServer, wait_until
from tests.workers.doubles import job_of
from tests.workers.stepped import KNOWN, SteppedHarness

ROOMY = Limits(100_000, 0, 60_000)
UNSIGNED = Keyring.parse(None)
Connect = Callable[[], Broker]
"""Another end of the test's broker."""


@pytest.fixture(params=["memory", "redis"])
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Each broker in turn, empty."""
    ends: list[Broker] = []

    def on(make: Connect) -> Connect:
        def connect() -> Broker:
            ends.append(make())
            return ends[-1]

        return connect

    if request.param == "memory":
        yield on(MemoryBroker().connect)
    else:
        server: RedisServer = request.getfixturevalue("shared_redis")
        yield on(lambda: RedisStreams.from_url(server.url))
    for end in ends:
        end.close()


class DrainHarness:
    """A drain, its metrics, and a producer for its models."""

    def __init__(self, broker: Broker, drain: Drain, metrics: InferenceMetrics, models: dict[str, Any]) -> None:
        self.broker = broker
        self.drain = drain
        self.metrics = metrics
        self._models = models
        self._builder = JobBuilder(tenant="acme", keyring=UNSIGNED, max_bytes=10 << 20)

    def sealed(self, model: str, number: float = 0, **how: Any) -> Publication:
        """A job on its way to the broker."""
        return self._builder.build(self._models[model], {"x": [[number, 0, 0, 0]]}, SubmitOptions(**how))

    def publish(self, model: str, *numbers: float, **how: Any) -> list[str]:
        """One job per number; their ids."""
        jobs = [self.sealed(model, number, **how) for number in numbers]
        assert {receipt.outcome for receipt in self.broker.publish(model, jobs, ROOMY)} == {"accepted"}
        return [job.job_id for job in jobs]

    def state(self, job_id: str) -> State:
        """What the job's record says."""
        job_record = self.broker.job_record(job_id)
        assert job_record is not None
        return job_record.state

    def result(self, job_id: str) -> tuple[ResultHeader, float | None]:
        """The result, once it is there: its header, and the first number of `y`."""

        def sealed() -> bytes:
            job_record = self.broker.job_record(job_id)
            return job_record.result if job_record else b""

        header, body = open_result(wait_until(sealed, 10, "the job ends"), UNSIGNED)
        return header, None if header.error else float(decode(header.content, body)["y"][0, 0])

    def is_ready(self) -> bool:
        """The READY gauge."""
        return bool(self.metrics.snapshot()["ready"])

    def counted(self, counter: str) -> float:
        """The sum of a counter over its labels."""
        (family,) = [family for family in self.metrics.collect() if family.name == counter]
        return sum(sample.value for sample in family.samples)

    def loaded(self) -> dict[str, float]:
        """The model_loaded gauge by model."""
        (family,) = [family for family in self.metrics.collect() if family.name == "model_loaded"]
        return {sample.labels["model"]: sample.value for sample in family.samples}


StartDrain = Callable[..., DrainHarness]


@pytest.fixture
def start(connect: Connect, models_root: Path) -> Iterator[StartDrain]:
    """Starts drains for the packages of `models_root`; those that still run are stopped."""
    harnesses: list[DrainHarness] = []
    names = itertools.count()

    def start(
        checkpoint: Callable[[str], None] = lambda _: None, *, load: bool = True, **settings: Any
    ) -> DrainHarness:
        packages = [load_package(find(models_root, path.name).path) for path in sorted(models_root.iterdir())]
        metrics = InferenceMetrics((0.1, 1.0))
        drain = build_drain(
            Settings.load(overrides={"queue": {"lease_s": 1.0}, **settings}),
            connect(),
            packages,
            DrainOptions(
                name=f"harness-{next(names)}",
                device="cpu",
                threads=1,
                listener=NullListener(),
                metrics=metrics,
                checkpoint=checkpoint,
            ),
        )
        harnesses.append(DrainHarness(connect(), drain, metrics, {each.spec.name: each.spec for each in packages}))
        if load:
            drain.load()
            drain.start()
        return harnesses[-1]

    yield start
    for harness in harnesses:
        harness.drain.stop(1.0)


def test_jobs_are_answered(start: StartDrain, models_root: Path, slot: str):
    """Claimed, run and committed, with the worker, version and times in the result."""
    write_double(models_root, slot)
    harness = start()
    for number, job_id in enumerate(harness.publish(slot, *range(100))):
        header, answer = harness.result(job_id)
        assert (header.id, header.worker, header.version, answer) == (job_id, harness.drain.name, "1", 2 * number)
        assert 1 <= header.batch_size <= 16


def test_gauges_follow_the_life_of_a_worker(start: StartDrain, models_root: Path, slot: str):
    """Not ready before start, ready after, not ready once it stops; a model counts as loaded in between only."""
    write_double(models_root, slot)
    harness = start(load=False)
    assert not harness.is_ready()
    harness.drain.load()
    assert harness.loaded() == {slot: 1}
    assert not harness.is_ready()
    harness.drain.start()
    wait_until(lambda: harness.drain.health.readiness[0], 5, "the drain is ready")
    assert harness.is_ready()
    harness.drain.stop(1.0)
    assert not harness.is_ready()
    assert harness.loaded() == {slot: 0}
    assert harness.drain.name not in [json.loads(report)["name"] for report in harness.broker.workers()]


def test_stop_finishes_the_running_batch_and_gives_back_the_rest(
    start: StartDrain, models_root: Path, slot: str, tmp_path: Path
):
    """What ran is committed; what was claimed beyond it goes to the next worker, for which it is the first attempt."""
    forward_log = tmp_path / "forward_log"
    write_recorder(models_root, forward_log, slot, forward_s=0.3)
    harness = start()
    jobs = harness.publish(slot, *range(1, 41))
    wait_until(lambda: any(1 in rows for rows in recorded_forwards(forward_log)), 5, "the first batch runs")
    harness.drain.stop(5.0)
    done = [job_id for job_id in jobs if harness.state(job_id) is State.COMPLETED]
    ran = [number for rows in recorded_forwards(forward_log) for number in rows if number]
    assert len(done) == len(ran) > 0
    assert {harness.state(job_id) for job_id in jobs[len(done) :]} == {State.QUEUED}

    other = start()
    results = [other.result(job_id) for job_id in jobs]
    assert [answer for _, answer in results] == [2 * number for number in range(1, 41)]
    assert {header.attempt for header, _ in results} == {1}
    assert sorted(number for rows in recorded_forwards(forward_log) for number in rows if number) == list(range(1, 41))


def test_stop_without_grace_gives_back_what_runs(start: StartDrain, models_root: Path, slot: str, tmp_path: Path):
    """A forward longer than the grace period: its jobs run again elsewhere, and its own result is thrown away."""
    forward_log = tmp_path / "forward_log"
    write_recorder(models_root, forward_log, slot, forward_s=1.5)
    harness = start()
    jobs = harness.publish(slot, 1, 2, 3)
    wait_until(lambda: any(1 in rows for rows in recorded_forwards(forward_log)), 5, "the batch runs")
    harness.drain.stop(0.0)
    assert {harness.state(job_id) for job_id in jobs} == {State.QUEUED}
    other = start()
    assert [other.result(job_id)[0].worker for job_id in jobs] == [other.drain.name] * 3


def test_foreign_bytes_are_dead_lettered(start: StartDrain, models_root: Path, slot: str):
    """What is no envelope, or one of another queue, goes to the dead letters; the job behind it is answered."""
    write_double(models_root, slot)
    harness = start()
    harness.broker.publish(slot, [Publication(new_job_id(slot), Priority.NORMAL, b"\x80not a job", "acme")], ROOMY)
    low = harness.sealed(slot, priority="low")
    harness.broker.publish(slot, [Publication(low.job_id, Priority.CRITICAL, low.sealed, low.tenant)], ROOMY)
    (good,) = harness.publish(slot, 21)
    assert harness.result(good)[1] == 42
    wait_until(lambda: harness.counted("penstock_quarantined") == 2, 5, "both are dead-lettered")
    wait_until(lambda: not sum(depth.jobs for depth in harness.broker.depths(slot)), 30, "the queue is empty")


@pytest.mark.parametrize("deadline_s", [0.02, 0.2], ids=["while it waits", "while its batch is ready"])
def test_job_never_starts_after_its_deadline(
    deadline_s: float, start: StartDrain, models_root: Path, slot: str, tmp_path: Path
):
    """A deadline that passes while another forward runs: the job expires, also when its batch had been formed."""
    forward_log = tmp_path / "forward_log"
    write_recorder(models_root, forward_log, slot, forward_s=1.5)
    harness = start()
    (first,) = harness.publish(slot, 1)
    wait_until(lambda: [1] in recorded_forwards(forward_log), 5, "the first job runs")
    (late,) = harness.publish(slot, 2, deadline_s=deadline_s, priority="critical")
    (patient,) = harness.publish(slot, 3, deadline_s=30)
    assert [harness.result(job_id)[1] for job_id in (first, patient)] == [2, 6]
    assert harness.state(late) is State.EXPIRED
    assert 2 not in [number for rows in recorded_forwards(forward_log) for number in rows]


def test_bad_job_fails_alone(start: StartDrain, models_root: Path, slot: str):
    """A batch that raises is bisected: the neighbours of the bad row succeed."""
    write_raiser(models_root, slot)
    harness = start()
    jobs = harness.publish(slot, *[-1 if number == 9 else number for number in range(16)])
    for number, job_id in enumerate(jobs):
        header, answer = harness.result(job_id)
        if number == 9:
            assert header.error is not None
            assert (header.error.code, header.error.message) == ("ModelError", "ValueError: a negative row")
        else:
            assert answer == 2 * number


def test_result_that_a_successor_has_given_is_not_replaced(start: StartDrain, models_root: Path, slot: str):
    """A worker that is held up before its commit, beyond its lease, finds the job answered: fenced, and counted."""
    write_double(models_root, slot)
    is_held, may_go = threading.Event(), threading.Event()

    def hold_up(point: str) -> None:
        if point == "before-commit" and not is_held.is_set():
            is_held.set()
            may_go.wait(180)

    harness = start(hold_up)
    # As if the whole process were frozen, its leases lapse.
    harness.drain.leases.stop(1.0)
    (job_id,) = harness.publish(slot, 21)
    assert is_held.wait(180)
    successor = start()
    header, answer = successor.result(job_id)
    assert (header.worker, header.attempt, answer) == (successor.drain.name, 2, 42)
    may_go.set()
    wait_until(lambda: harness.counted("penstock_fenced") == 1, 5, "the late commit is discarded")
    assert harness.result(job_id)[0].worker == successor.drain.name


def test_several_models_share_a_worker_fairly(start: StartDrain, models_root: Path, slot: str, tmp_path: Path):
    """A model with a thousand jobs waiting delays another's only job by a few batches."""
    flooded, calm, forward_log = f"{slot}-a", f"{slot}-b", tmp_path / "forward_log"
    for model in (flooded, calm):
        write_recorder(models_root, forward_log, model, forward_s=0.01)
    harness = start()
    flood = harness.publish(flooded, *range(1, 1001))
    (alone,) = harness.publish(calm, 5000)
    assert harness.result(alone)[1] == 10_000
    harness.result(flood[-1])
    order = [rows for rows in recorded_forwards(forward_log) if rows[0]]
    position = order.index([5000])
    begun_before = sum(len(rows) for rows in order[:position])
    assert begun_before < 300


def test_a_drain_without_models_is_refused(start: StartDrain):
    """A worker that could serve nothing says so."""
    with pytest.raises(ConfigurationError, match="There is no model to serve"):
        start()


_MISBEHAVIOUR = {
    "exits": ("raise SystemExit('goodbye')", "ModelError", "SystemExit: goodbye"),
    "other output": ("return {'z': inputs['x']}", "ModelError", "Declared outputs: y"),
    "no array": ("return {'y': 'text'}", "ModelError", "Output y is object"),
    "not finite": ("return {'y': inputs['x'] * float('nan')}", "NonFiniteOutput", "Expected finite numbers"),
    "too much": ("return {'y': np.zeros((1, 20_000_000), np.float32)}", "ModelError", "Expected at most 67108864"),
}


@pytest.mark.parametrize(("fault", "code", "text"), _MISBEHAVIOUR.values(), ids=list(_MISBEHAVIOUR))
def test_misbehaving_model_fails_its_job_alone(
    fault: str, code: str, text: str, start: StartDrain, models_root: Path, slot: str
):
    """Whatever a model does instead of answering, its job ends with a reason, and the next one is answered."""
    source = f"""
import numpy as np

def build():
    def forward(inputs):
        if inputs["x"][0, 0] < 0:
            {fault}
        return {{"y": inputs["x"] * 2}}

    return forward
"""
    package = write_package(models_root, slot, source, max_batch_size=1)
    file = package / "model.yaml"
    file.write_text(file.read_text().replace("  - batch\n  - 4\n", "  - batch\n  - n\n"))
    harness = start()
    wrong, good = harness.publish(slot, -1, 21)
    header, _ = harness.result(wrong)
    assert header.error is not None
    assert header.error.code == code
    assert text in header.error.message
    assert harness.result(good)[1] == 42
    assert harness.drain.health.unhealthy_reason() is None


def test_equal_of_a_withdrawn_job_still_runs(start: StartDrain, models_root: Path, slot: str, tmp_path: Path):
    """Of two equal jobs the first is withdrawn while its batch waits: it never runs, and the second is answered."""
    forward_log = tmp_path / "forward_log"
    write_recorder(models_root, forward_log, slot, forward_s=1.5)
    harness = start()
    harness.publish(slot, 1)
    wait_until(lambda: [1] in recorded_forwards(forward_log), 5, "a forward runs")
    (leader,), (follower,) = harness.publish(slot, 21), harness.publish(slot, 21)
    wait_until(lambda: harness.counted("penstock_single_flight") == 1, 5, "one follows the other")
    harness.broker.cancel(leader, "acme", b"")
    assert harness.result(follower)[1] == 42
    assert harness.state(leader) is State.CANCELLED
    assert [rows for rows in recorded_forwards(forward_log) if 21 in rows] == [[21]]


def test_a_cancelled_follower_leaves_while_its_leader_waits(harness: SteppedHarness, models_root: Path):
    """Its client hears so at once; the leader and its other follower are answered."""
    write_double(models_root)
    worker = harness.start_worker()
    harness.publish("double", 1)
    run = worker.begin_next()
    leader, cancelled, other = (harness.publish("double", 7)[0] for _ in range(3))
    worker.turn(2)
    assert worker.counted("penstock_single_flight") == 2
    harness.broker.cancel(cancelled, "acme", b"")
    harness.pass_time(3)
    assert harness.state(cancelled) is State.CANCELLED
    assert [harness.state(job) for job in (leader, other)] == [State.QUEUED] * 2
    worker.end(run)
    worker.forwards()
    assert [harness.answer(job) for job in (leader, other)] == [14, 14]
    assert len(worker.drain.parts.leased) == 0


def test_jobs_of_a_model_with_chance_in_it_run_each(start: StartDrain, models_root: Path, slot: str, tmp_path: Path):
    """A model that is declared not to be deterministic gets every one of equal jobs."""
    forward_log = tmp_path / "forward_log"
    package = write_recorder(models_root, forward_log, slot, forward_s=0.1)
    with (package / "model.yaml").open("a") as spec:
        spec.write("deterministic: false\n")
    harness = start()
    for job_id in harness.publish(slot, *[7] * 5):
        assert harness.result(job_id)[1] == 14
    assert [number for rows in recorded_forwards(forward_log) for number in rows].count(7) == 5


def test_a_stop_in_the_middle_of_a_turn_claims_nothing(harness: SteppedHarness, models_root: Path):
    """The rest of that turn sends neither a claim nor a blocking claim: the job waits for another worker."""
    write_double(models_root)
    worker = harness.start_worker()
    worker.drain.lifecycle.request(lambda: worker.drain.ask_to_stop(10.0))
    (job,) = harness.publish("double", 1)
    worker.turn(3)
    assert worker.drain.reserved() == worker.drain.active() == []
    successor = harness.start_worker()
    assert successor.forward() == [job]


def test_a_worker_that_cannot_claim_does_not_look_again_at_once(harness: SteppedHarness, models_root: Path):
    """It waits for its replacement, or its jobs take all room: a turn each millisecond would do nothing."""
    write_double(models_root)
    worker = harness.start_worker()
    assert worker.drain.sleep_s() == 0.001
    worker.drain.parts.scheduler.unhealthy_reason = "a forward hangs"
    assert worker.drain.sleep_s() == 0.25
    worker.drain.parts.scheduler.unhealthy_reason = ""
    worker.drain.parts.leased._sizes["double"] = worker.drain.parts.claimer._most_bytes
    assert worker.drain.sleep_s() == 0.25


def test_an_idle_worker_sleeps_until_its_blocking_claim_ends(harness: SteppedHarness, models_root: Path):
    """It has nothing to look at meanwhile; a worker that holds a job, or has a request, looks four times a second."""
    write_double(models_root)
    worker = harness.start_worker()
    worker.turn(3)
    assert worker.drain.is_at_rest
    assert worker.drain.sleep_s() == worker.drain.parts.claimer.next_wakeup() - harness.now
    assert worker.drain.sleep_s() > 1.0
    worker.drain.lifecycle.request(lambda: None)
    assert worker.drain.sleep_s() == 0.25
    worker.turn()
    assert worker.drain.sleep_s() > 1.0
    worker.drain.parts.leased.take([job_of()])
    assert worker.drain.sleep_s() == 0.25


def test_an_engine_without_a_free_seat_does_not_look_for_urgent_jobs(harness: SteppedHarness, models_root: Path):
    """They end its sleep. Once a seat is free, the next turn claims the other jobs; no time passes here."""
    write_double(models_root)
    worker = harness.start_worker()
    (version,) = worker.drain.lifecycle.turns
    version.queue.follow(replace(version.queue.policy, seats=2, concurrency=4))
    leased = worker.drain.parts.leased
    harness.publish("double", 1, 2, 3, 4)
    worker.turn(3)
    assert len(leased) == 2
    assert worker.drain.parts.claimer.is_armed
    assert worker.drain.sleep_s() == 0.25
    harness.publish("double", 5, priority="high")
    worker.turn()
    assert len(leased) == 3
    assert sum(len(jobs) for jobs in worker.forwards()) == 5
    assert len(leased) == 0


def test_a_seat_that_a_commit_frees_is_taken_at_once(harness: SteppedHarness, models_root: Path):
    """The turn of the commit withdraws the claim of urgent jobs, and the next one, without a sleep, claims."""
    write_double(models_root)
    worker = harness.start_worker()
    (version,) = worker.drain.lifecycle.turns
    version.queue.follow(replace(version.queue.policy, seats=1, concurrency=2))
    jobs = harness.publish("double", 1, 2)
    run = worker.begin_next()
    assert worker.drain.parts.claimer.is_armed
    worker.drain.parts.executor.run(run)
    worker.drain.parts.executor.finish("a", run)
    worker.turn()
    assert [harness.state(job) for job in jobs] == [State.COMPLETED, State.QUEUED]
    assert worker.drain.sleep_s() == 0.0
    worker.turn()
    assert len(worker.drain.parts.leased) == 1
    assert worker.drain.parts.claimer.is_armed
    assert worker.drain.sleep_s() == 0.25
    assert worker.forwards() == [[jobs[1]]]


class WatchedBroker(MemoryBroker):
    """Notes for each commit whether the next blocking claim was there before the commit was answered."""

    def __init__(self, of: MemoryBroker) -> None:
        super().__init__(of._state.clock)
        self._state, self._changed = of._state, of._changed
        self.had_claim: list[bool] = []
        self.sent: list[int] = []
        """Results of each exchange."""
        self.is_answering = False

    def exchange(
        self,
        consumer: str,
        commits: Sequence[Commit],
        claims: Sequence[Claim],
        result_ttl_ms: int,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[list[CommitStatus], list[Delivery]]:
        self.sent.append(len(commits))
        self.is_answering = True
        answer = super().exchange(consumer, commits, claims, result_ttl_ms, meanwhile)
        self.is_answering = False
        if commits:
            self.had_claim.append(self._armed is not None)
        return answer


def test_the_next_blocking_claim_goes_out_behind_the_commit(harness: SteppedHarness, models_root: Path):
    """A client that sends its next job at once does not wait until this worker has read the answer to the commit."""
    shutil.copytree(ROOT / "models" / "mlp", models_root / "mlp")
    worker = harness.start_worker(connect=WatchedBroker)
    broker = worker.broker
    assert isinstance(broker, WatchedBroker)
    for version in worker.drain.lifecycle.turns:
        for _ in range(KNOWN):
            version.queue.note_forward(0.0001)
    worker.turn(3)
    row = {"x": [[1.0] * 384]}
    for _ in range(3):
        (job,) = harness.publish_inputs("mlp", row)
        worker.turn(2)
        assert harness.state(job) is State.COMPLETED, "the forward ran on the thread of the drain"
    assert broker.had_claim == [True] * 3


def test_a_short_forward_runs_while_the_broker_takes_results(
    harness: SteppedHarness, models_root: Path, monkeypatch: pytest.MonkeyPatch
):
    """One runs at once where there are no results to send. No model thread runs any, and all results are sent."""
    shutil.copytree(ROOT / "models" / "mlp", models_root / "mlp")
    worker = harness.start_worker(connect=WatchedBroker)
    broker, executor = worker.broker, worker.drain.parts.executor
    assert isinstance(broker, WatchedBroker)
    for version in worker.drain.lifecycle.turns:
        for _ in range(KNOWN):
            version.queue.note_forward(0.0001)
    worker.turn(3)
    forwards: list[tuple[int, bool]] = []
    run = executor.run

    def noted(batch: BatchRun) -> None:
        forwards.append((batch.batch.rows, broker.is_answering))
        run(batch)

    monkeypatch.setattr(executor, "run", noted)
    broker.sent.clear()
    harness.publish_inputs("mlp", *[{"x": [[float(number)] * 384]} for number in range(150)])
    worker.turn(6)
    sent = [count for count in broker.sent if count]
    assert sum(sent) == 150
    assert len(worker.drain.parts.leased) == 0
    assert [rows for rows, _ in forwards] == sent
    assert [is_meanwhile for _, is_meanwhile in forwards] == [False, False, *[True] * (len(sent) - 2)]
    assert len(sent) > 3


def test_reports_wait_a_moment_for_the_next_job(harness: SteppedHarness, models_root: Path):
    """Not longer: without another job, the turn behind that of the commit reports it."""
    write_double(models_root)
    worker = harness.start_worker()
    (job,) = harness.publish("double", 1)
    run = worker.begin_next()
    worker.drain.parts.executor.run(run)
    worker.drain.parts.executor.finish("a", run)
    worker.turn()
    assert harness.state(job) is State.COMPLETED
    assert worker.drain.parts.telemetry.batches == 0
    assert worker.drain.sleep_s() == 0.001
    worker.turn()
    assert worker.drain.parts.telemetry.batches == 1
    assert worker.drain.sleep_s() > 1.0


class HeldForward:
    """A worker whose I/O thread is in a forward, until the test lets it go on; further jobs wait behind it.

    held: the number of that forward. The first one is behind no results to send, so there is no blocking claim then.
    """

    def __init__(
        self, start: StartDrain, models_root: Path, slot: str, monkeypatch: pytest.MonkeyPatch, *, held: int
    ) -> None:
        shutil.copytree(ROOT / "models" / "mlp", models_root / slot)
        amend(models_root / slot / "1", name=slot, batching={"max_batch_size": 2})
        self.slot, self._held = slot, held
        self.harness = start(load=False)
        self.drain = self.harness.drain
        self.begun: list[list[str]] = []
        """The jobs of each forward."""
        self.threads: list[str] = []
        self._is_held, self._may_go = threading.Event(), threading.Event()
        self._run = self.drain.parts.executor.run
        monkeypatch.setattr(self.drain.parts.executor, "run", self._hold)
        self.drain.load()
        (version,) = self.drain.lifecycle.turns
        for _ in range(KNOWN):
            version.queue.note_forward(0.0001)
        # A busy machine makes no forward a long one.
        monkeypatch.setattr(version.queue, "note_forward", lambda _seconds: None)
        self.drain.start()
        wait_until(lambda: self.drain.is_at_rest, 30, "the blocking claim waits for jobs")
        jobs = self.publish(2 * held + 1)
        assert self._is_held.wait(180)
        assert self.threads == ["drain"] * held
        assert self.drain.parts.claimer.is_armed is (held > 1)
        done = 2 * (held - 1)
        self.running, self.waiting = jobs[done : done + 2], jobs[done + 2 :]
        assert self.begun[-1] == self.running
        assert self.are_claimed(jobs[done:])

    def _hold(self, run: BatchRun) -> None:
        self.begun.append([job.header.id for job in run.jobs])
        self.threads.append(threading.current_thread().name)
        if len(self.begun) == self._held:
            self._is_held.set()
            self._may_go.wait(120)
        self._run(run)

    def let_go(self) -> None:
        """The forward ends, and the thread after it."""
        self._may_go.set()
        self.drain._thread.join(60)
        assert not self.drain._thread.is_alive()

    def publish(self, count: int) -> list[str]:
        """So many jobs; their ids."""
        builder, spec = self.harness._builder, self.harness._models[self.slot]
        jobs = [builder.build(spec, {"x": [[float(number)] * 384]}, SubmitOptions()) for number in range(count)]
        self.harness.broker.publish(self.slot, jobs, ROOMY)
        return [job.job_id for job in jobs]

    def are_claimed(self, jobs: Sequence[str]) -> bool:
        """Whether this worker holds all of these jobs; otherwise it must hold none."""
        holders = {record.holder for job in jobs if (record := self.harness.broker.job_record(job)) is not None}
        assert holders <= {"", self.drain.consumer}
        return holders == {self.drain.consumer}

    def are_free(self, jobs: Sequence[str]) -> bool:
        """Whether these jobs wait for a worker."""
        records = [self.harness.broker.job_record(job) for job in jobs]
        return all(record and record.state is State.QUEUED and not record.is_claimed for record in records)


def test_a_stop_gives_back_the_jobs_behind_a_forward_on_the_io_thread(
    start: StartDrain, models_root: Path, slot: str, monkeypatch: pytest.MonkeyPatch
):
    """At once, while that forward has its grace; the blocking claim takes no later job. The forward is committed."""
    held = HeldForward(start, models_root, slot, monkeypatch, held=2)
    stopping = threading.Thread(target=held.drain.stop, args=(600.0,), daemon=True)
    stopping.start()
    wait_until(lambda: held.are_free(held.waiting), 30, "the jobs behind the forward are given back")
    later = held.publish(3)
    assert held.are_free(later)
    assert held.are_claimed(held.running)
    held.let_go()
    stopping.join(60)
    assert not stopping.is_alive()
    assert {held.harness.state(job) for job in held.running} == {State.COMPLETED}
    assert held.are_free([*held.waiting, *later])


@pytest.mark.parametrize("forward", [1, 2])
def test_a_forward_on_the_io_thread_that_outlasts_the_grace_is_given_up(
    forward: int, start: StartDrain, models_root: Path, slot: str, monkeypatch: pytest.MonkeyPatch
):
    """Its jobs run elsewhere, as those do that waited behind it; its own results come too late."""
    held = HeldForward(start, models_root, slot, monkeypatch, held=forward)
    held.drain.wind_up(0.0)
    assert held.are_free([*held.running, *held.waiting])
    assert held.are_free(held.publish(1))
    held.let_go()
    assert held.are_free([*held.running, *held.waiting])


def test_jobs_that_a_stop_has_given_back_do_not_begin(
    start: StartDrain, models_root: Path, slot: str, monkeypatch: pytest.MonkeyPatch
):
    """Another worker has them by now."""
    held = HeldForward(start, models_root, slot, monkeypatch, held=1)
    stopping = threading.Thread(target=held.drain.wind_up, args=(600.0,), daemon=True)
    stopping.start()
    wait_until(lambda: held.are_free(held.waiting), 30, "the jobs behind the forward are given back")
    held.let_go()
    stopping.join(60)
    assert held.begun == [held.running]


def test_a_long_forward_on_the_io_thread_was_progress(
    harness: SteppedHarness, models_root: Path, monkeypatch: pytest.MonkeyPatch
):
    """It is within its limit: the process is healthy while it runs and right behind it, until that is long ago."""
    shutil.copytree(ROOT / "models" / "mlp", models_root / "mlp")
    worker = harness.start_worker()
    drain, executor = worker.drain, worker.drain.parts.executor
    (version,) = drain.lifecycle.turns
    for _ in range(KNOWN):
        version.queue.note_forward(0.0001)
    # This thread takes the turns of both.
    monkeypatch.setattr(drain.health, "_thread", threading.current_thread())
    monkeypatch.setattr(drain.leases, "_thread", threading.current_thread())
    drain.health.is_serving = True
    progress_s = drain.health._progress_s
    version.policy = replace(version.policy, timeout_s=4 * progress_s)
    run, run_kept = executor.run, executor.run_kept
    seen: list[str | None] = []

    def lasts(batch: BatchRun) -> None:
        harness.now += 2 * progress_s
        drain.leases.tick()
        seen.append(drain.health.unhealthy_reason())
        run(batch)

    def looks_behind() -> None:
        run_kept()
        seen.append(drain.health.unhealthy_reason())

    monkeypatch.setattr(executor, "run", lasts)
    executor.start()
    worker.turn(3)
    monkeypatch.setattr(executor, "run_kept", looks_behind)
    (job,) = harness.publish_inputs("mlp", {"x": [[1.0] * 384]})
    worker.turn(2)
    assert harness.state(job) is State.COMPLETED
    assert seen
    assert set(seen) == {None}
    harness.now += progress_s + 1
    drain.leases.tick()
    assert drain.health.unhealthy_reason() == f"the drain thread has made no progress for {progress_s:g} s"
    executor.stop()
