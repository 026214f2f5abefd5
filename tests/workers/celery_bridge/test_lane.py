"""The lane: from a task message to a job, and from a finished job to Celery's result, with crashes in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.registry.admission import JobBuilder, SpecCache
from penstock.registry.broker.base import Claim, Commit, Delivery, Limits, State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Failure, JobHeader, Keyring, ResultHeader, open_job, seal
from penstock.registry.errors import (
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    ModelError,
    QueueFull,
    ResultGone,
    UnknownModel,
)
from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import TensorSpec
from penstock.registry.queues import lane_key, record_key
from penstock.registry.tensors import decode, encode
from penstock.workers.celery_bridge import lane
from penstock.workers.celery_bridge.lane import TaskIngress, TaskResultForwarder
from tests.servers import RedisServer, wait_until

UNSIGNED = Keyring.parse(None)
SIGNED = Keyring.parse("k1:" + "A" * 43 + "=")
LIMITS = Limits(max_depth=3, tenant_max_in_flight=0, job_ttl_ms=60_000)
ROWS = {"x": [[1.0, 2.0, 3.0, 4.0]]}


@pytest.fixture
def broker(shared_redis: RedisServer, slot: str) -> Iterator[RedisStreams]:
    """A broker that knows the model `slot`: x float32 (batch, 4) -> y."""
    broker = RedisStreams.from_url(shared_redis.url)
    spec = ModelSpec(
        name=slot,
        version="1",
        format="python",
        entrypoint="model:build",
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 4)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("batch", 4)),),
    )
    broker.put_spec(slot, spec.to_json())
    broker.prepare([slot])
    yield broker
    broker._run(["SREM", "penstock:models", slot])
    broker.close()


def ingress(broker: RedisStreams, *, keyring: Keyring = UNSIGNED, is_open: bool = True) -> TaskIngress:
    builder = JobBuilder(tenant="default", keyring=keyring, max_bytes=1024)
    return TaskIngress(broker, builder, SpecCache(Path("nowhere")), LIMITS, is_open=is_open)


def claim(broker: RedisStreams, slot: str) -> list[Delivery]:
    return broker.exchange("c:1", [], [Claim(slot, 16, 0, 1000)], 60_000)[1]


def finish(
    broker: RedisStreams,
    delivery: Delivery,
    state: State = State.COMPLETED,
    error: Failure | None = None,
) -> JobHeader:
    """What a drain does with a claimed job: commit twice its input, or a failure."""
    header, body = open_job(delivery.sealed, UNSIGNED)
    outputs = {} if error else {"y": decode(header.content, body)["x"] * np.float32(2)}
    content, answer = encode(outputs)
    result = ResultHeader(header.id, header.context, "1", "w", content, error)
    commit = Commit(
        delivery.slot,
        delivery.priority,
        delivery.entry_id,
        header.id,
        state,
        seal("result", result, answer, UNSIGNED),
        header.tenant,
        header.reply,
    )
    broker.exchange("c:1", [commit], [], 60_000)
    return header


class Ledger:
    """Keeps outcomes in memory; `fail` makes the next ones fail, as a result backend that is away."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.calls = 0
        self.fail = False

    def _keep(self, task_id: str, outcome: Any) -> None:
        self.calls += 1
        if self.fail:
            raise ConnectionError("away")
        self.entries.append((task_id, outcome))

    def succeeded(self, task_id: str, result: dict[str, Any]) -> None:
        self._keep(task_id, result)

    def failed(self, task_id: str, error: Exception) -> None:
        self._keep(task_id, error)

    def revoked(self, task_id: str) -> None:
        self._keep(task_id, "revoked")

    def of(self, task_id: str) -> Any:
        return wait_until(
            lambda: next((outcome for known, outcome in self.entries if known == task_id), None), 10, f"{task_id} ends"
        )


@contextmanager
def carrying(
    server: RedisServer, broker: RedisStreams, ledger: Ledger, worker: str = "w1"
) -> Iterator[TaskResultForwarder]:
    replies = TaskResultForwarder(server.client(), broker, UNSIGNED, ledger, worker=worker)
    replies.start()
    try:
        yield replies
    finally:
        replies.stop()


def test_a_task_becomes_a_job_under_its_own_id(broker: RedisStreams, slot: str):
    """The job carries what the task asked for, and its result is to come back through the lane."""
    job_id = ingress(broker).admit(
        "task-1", model=slot, inputs=ROWS, tenant="acme", priority="high", deadline_s=2.5, version="1", outputs=["y"]
    )
    assert job_id == f"{slot}.task-1"
    (delivery,) = claim(broker, slot)
    header, body = open_job(delivery.sealed, UNSIGNED)
    assert (header.id, header.tenant, header.priority, header.deadline_ms) == (job_id, "acme", "high", 2500)
    assert (header.version, header.options.outputs, header.options.lane) == ("1", ("y",), True)
    assert header.reply == lane_key(slot)
    assert decode(header.content, body)["x"].tolist() == ROWS["x"]


def test_the_same_task_again_is_the_same_job(broker: RedisStreams, slot: str):
    """Celery redelivers a message that was not acknowledged: nothing is queued twice, also after the job ran."""
    assert ingress(broker).admit("task-1", model=slot, inputs=ROWS) == ingress(broker).admit(
        "task-1", model=slot, inputs=ROWS
    )
    (delivery,) = claim(broker, slot)
    finish(broker, delivery)
    ingress(broker).admit("task-1", model=slot, inputs=ROWS)
    assert claim(broker, slot) == []


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": "nobody"}, UnknownModel, "Unknown model 'nobody'"),
        ({"model": "../etc"}, InvalidInput, "Bad model name"),
        ({"model": 7}, InvalidInput, "Bad model name"),
        ({"inputs": {"z": [[1.0]]}}, InvalidInput, "Missing required input"),
        ({"inputs": [1.0]}, InvalidInput, "Expected a mapping"),
        ({"inputs": {"x": [[1.0, 2.0]]}}, InvalidInput, "shape"),
        ({"inputs": {"x": [[0.0] * 4] * 100}}, InvalidInput, "Expected at most 1024"),
        ({"priority": "urgent"}, InvalidInput, "Unknown priority"),
        ({"priority": ["high"]}, InvalidInput, "Unknown priority"),
        ({"tenant": "Not Me"}, InvalidInput, "Bad tenant name"),
        ({"deadline_s": -1}, DeadlineExceeded, "Expected a positive number"),
        ({"deadline_s": "soon"}, InvalidInput, "deadline_s is a str. Expected seconds"),
        ({"deadline_s": float("nan")}, DeadlineExceeded, "Expected a positive number"),
        ({"version": "2"}, UnknownModel, "Expected version: 1"),
        ({"outputs": ["z"]}, InvalidInput, "Unknown output"),
        ({"task_id": "no spaces please"}, InvalidInput, "Bad job id"),
    ],
)
def test_what_will_never_be_accepted_is_rejected_with_what_was_expected(
    broker: RedisStreams, slot: str, change: dict[str, Any], error: type[Exception], text: str
):
    """Nothing is written for a task whose job cannot be; its sender reads why."""
    arguments = {"task_id": "task-1", "model": slot, "inputs": ROWS, **change}
    with pytest.raises(error, match=text):
        ingress(broker).admit(arguments.pop("task_id"), **arguments)
    assert claim(broker, slot) == []


def test_a_full_queue_says_when_to_come_back(broker: RedisStreams, slot: str):
    """The lane puts such a message back, so the error is QueueFull with a pause, not a failure."""
    entrance = ingress(broker)
    for number in range(3):
        entrance.admit(f"task-{number}", model=slot, inputs=ROWS)
    with pytest.raises(QueueFull) as refusal:
        entrance.admit("task-3", model=slot, inputs=ROWS)
    assert refusal.value.retry_after_s > 0


def test_the_lane_is_closed_where_jobs_are_signed(broker: RedisStreams, slot: str):
    """Nobody signs a task message: with signing on the lane refuses, unless the operator trusts Celery's broker."""
    with pytest.raises(Forbidden, match="send_task is off here"):
        ingress(broker, keyring=SIGNED, is_open=False).admit("task-1", model=slot, inputs=ROWS)
    ingress(broker, keyring=SIGNED).admit("task-1", model=slot, inputs=ROWS)
    (delivery,) = claim(broker, slot)
    assert open_job(delivery.sealed, SIGNED)[0].key == "k1"


def test_every_end_of_a_job_reaches_celerys_backend(shared_redis: RedisServer, broker: RedisStreams, slot: str):
    """Results as nested lists, failures as exceptions of their class and text, cancelled jobs as revoked."""
    entrance, ledger = ingress(broker), Ledger()
    entrance.admit("done", model=slot, inputs=ROWS)
    entrance.admit("failed", model=slot, inputs=ROWS)
    entrance.admit("cancelled", model=slot, inputs=ROWS)
    done, failed, cancelled = claim(broker, slot)
    finish(broker, done)
    finish(broker, failed, State.FAILED, Failure("ModelError", "ValueError: no"))
    finish(broker, cancelled, State.CANCELLED, Failure("Cancelled", "The job was revoked before it ran"))
    with carrying(shared_redis, broker, ledger):
        assert ledger.of("done") == {
            "job_id": f"{slot}.done",
            "model": slot,
            "version": "1",
            "content_hash": "",
            "outputs": {"y": [[2.0, 4.0, 6.0, 8.0]]},
        }
        failure = ledger.of("failed")
        assert isinstance(failure, ModelError)
        assert str(failure) == "ValueError: no"
        assert ledger.of("cancelled") == "revoked"
        with shared_redis.client() as client:
            wait_until(lambda: client.xlen(lane_key(slot)) == 0, 5, "the lane is empty")


def test_results_wait_while_celerys_backend_is_away(
    shared_redis: RedisServer, broker: RedisStreams, slot: str, monkeypatch: pytest.MonkeyPatch
):
    """An outcome that could not be stored is tried again by the same worker, and leaves the lane only then."""
    monkeypatch.setattr(lane, "_RETRY_S", 0.05)
    ledger = Ledger()
    ledger.fail = True
    ingress(broker).admit("late", model=slot, inputs=ROWS)
    finish(broker, claim(broker, slot)[0])
    with carrying(shared_redis, broker, ledger), shared_redis.client() as client:
        wait_until(lambda: ledger.calls >= 3, 10, "it was tried again")
        assert client.xlen(lane_key(slot)) == 1
        ledger.fail = False
        assert ledger.of("late")["outputs"] == {"y": [[2.0, 4.0, 6.0, 8.0]]}
        wait_until(lambda: client.xlen(lane_key(slot)) == 0, 5, "the lane is empty")


@pytest.mark.parametrize("heir", ["w1", "w2"])
def test_results_of_a_worker_that_died_are_stored_by_another(
    shared_redis: RedisServer, broker: RedisStreams, slot: str, heir: str, monkeypatch: pytest.MonkeyPatch
):
    """A worker that read an entry and died leaves it pending: its successor of the same name finds it at once,
    another one when it is abandoned.
    """
    monkeypatch.setattr(lane, "_ABANDONED_MS", 50)
    monkeypatch.setattr(lane, "_REFRESH_S", 0.1)
    dead, ledger = Ledger(), Ledger()
    dead.fail = True
    ingress(broker).admit("orphan", model=slot, inputs=ROWS)
    finish(broker, claim(broker, slot)[0])
    with carrying(shared_redis, broker, dead, worker="w1"):
        wait_until(lambda: dead.calls, 10, "the first worker has it")
    with carrying(shared_redis, broker, ledger, worker=heir):
        assert ledger.of("orphan")["job_id"] == f"{slot}.orphan"


def test_a_result_that_expired_unseen_is_a_failure_and_not_a_hang(
    shared_redis: RedisServer, broker: RedisStreams, slot: str
):
    """The entry outlives the record: whoever waits hears that the result is gone."""
    ledger = Ledger()
    ingress(broker).admit("gone", model=slot, inputs=ROWS)
    header = finish(broker, claim(broker, slot)[0])
    with shared_redis.client() as client:
        client.delete(record_key(header.id))
    with carrying(shared_redis, broker, ledger):
        assert isinstance(ledger.of("gone"), ResultGone)


def test_a_model_that_appears_later_is_carried_too(
    shared_redis: RedisServer, broker: RedisStreams, slot: str, monkeypatch: pytest.MonkeyPatch
):
    """A worker carries the lane of every model on the broker, served by it or not, announced before it or not."""
    monkeypatch.setattr(lane, "_REFRESH_S", 0.05)
    ledger = Ledger()
    spec = broker.spec(slot)
    assert spec is not None
    broker._run(["SREM", "penstock:models", slot])
    with carrying(shared_redis, broker, ledger):
        wait_until(lambda: threading.active_count() > 1, 5, "it runs")
        broker.put_spec(slot, spec)
        ingress(broker).admit("first", model=slot, inputs=ROWS)
        finish(broker, claim(broker, slot)[0])
        assert ledger.of("first")["model"] == slot
