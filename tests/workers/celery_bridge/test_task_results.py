"""The Celery task endpoint, outwards: from a finished job to Celery's result, with crashes in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import TaskRevokedError

from penstock.registry.broker.base import State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Failure
from penstock.registry.errors import ForwardTimeout, ModelError, ResultGone, job_failure
from penstock.registry.queues import lane_key, record_key
from penstock.workers.celery_bridge.task_results import CeleryResultStore, TaskResultForwarder
from tests.servers import RedisServer, wait_until
from tests.workers.celery_bridge.endpoint import ROWS, UNSIGNED, claim, finish, ingress


class ResultMemory:
    """Keeps results in memory. While `is_away` is set every call fails, as with a backend that does not answer."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.calls = 0
        self.is_away = False

    def _keep(self, task_id: str, outcome: Any) -> None:
        self.calls += 1
        if self.is_away:
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
def forwarding(
    server: RedisServer, broker: RedisStreams, backend: ResultMemory, worker: str = "w1", **times_s: float
) -> Iterator[None]:
    forwarder = TaskResultForwarder(server.client(), broker, UNSIGNED, backend, worker=worker, **times_s)
    forwarder.start()
    try:
        yield
    finally:
        forwarder.stop()


def test_every_end_of_a_job_reaches_celerys_backend(shared_redis: RedisServer, broker: RedisStreams, slot: str):
    """Results as nested lists, failures as exceptions of their class and text, cancelled jobs as revoked."""
    endpoint, backend = ingress(broker), ResultMemory()
    endpoint.admit("done", model=slot, inputs=ROWS)
    endpoint.admit("failed", model=slot, inputs=ROWS)
    endpoint.admit("cancelled", model=slot, inputs=ROWS)
    done, failed, cancelled = claim(broker, slot)
    finish(broker, done)
    finish(broker, failed, State.FAILED, Failure("ModelError", "ValueError: no"))
    finish(broker, cancelled, State.CANCELLED, Failure("Cancelled", "The job was revoked before it ran"))
    with forwarding(shared_redis, broker, backend):
        assert backend.of("done") == {
            "job_id": f"{slot}.done",
            "model": slot,
            "version": "1",
            "content_hash": "",
            "outputs": {"y": [[2.0, 4.0, 6.0, 8.0]]},
        }
        failure = backend.of("failed")
        assert isinstance(failure, ModelError)
        assert str(failure) == "ValueError: no"
        assert backend.of("cancelled") == "revoked"
        with shared_redis.client() as client:
            wait_until(lambda: client.xlen(lane_key(slot)) == 0, 5, "the stream is empty")


def test_results_wait_while_celerys_backend_is_away(shared_redis: RedisServer, broker: RedisStreams, slot: str):
    """The same worker stores a result again that could not be stored; its entry stays until then."""
    backend = ResultMemory()
    backend.is_away = True
    ingress(broker).admit("late", model=slot, inputs=ROWS)
    finish(broker, claim(broker, slot)[0])
    with forwarding(shared_redis, broker, backend, retry_s=0.05), shared_redis.client() as client:
        wait_until(lambda: backend.calls >= 3, 10, "it was tried again")
        assert client.xlen(lane_key(slot)) == 1
        backend.is_away = False
        assert backend.of("late")["outputs"] == {"y": [[2.0, 4.0, 6.0, 8.0]]}
        wait_until(lambda: client.xlen(lane_key(slot)) == 0, 5, "the stream is empty")


@pytest.mark.parametrize("heir", ["w1", "w2"])
def test_results_of_a_worker_that_died_are_stored_by_another(
    shared_redis: RedisServer, broker: RedisStreams, slot: str, heir: str
):
    """A worker that dies after it read an entry leaves it pending. A worker of the same name finds it at once, another
    worker when the entry counts as abandoned.
    """
    times_s = {"abandoned_s": 0.05, "refresh_s": 0.1}
    dead, backend = ResultMemory(), ResultMemory()
    dead.is_away = True
    ingress(broker).admit("orphan", model=slot, inputs=ROWS)
    finish(broker, claim(broker, slot)[0])
    with forwarding(shared_redis, broker, dead, worker="w1", **times_s):
        wait_until(lambda: dead.calls, 10, "the first worker has it")
    with forwarding(shared_redis, broker, backend, worker=heir, **times_s):
        assert backend.of("orphan")["job_id"] == f"{slot}.orphan"


def test_a_result_that_expired_unseen_is_a_failure_and_not_a_hang(
    shared_redis: RedisServer, broker: RedisStreams, slot: str
):
    """The entry outlives the record: `AsyncResult.get` raises ResultGone."""
    backend = ResultMemory()
    ingress(broker).admit("gone", model=slot, inputs=ROWS)
    header = finish(broker, claim(broker, slot)[0])
    with shared_redis.client() as client:
        client.delete(record_key(header.id))
    with forwarding(shared_redis, broker, backend):
        assert isinstance(backend.of("gone"), ResultGone)


def test_results_of_a_model_that_appears_later_are_forwarded(
    shared_redis: RedisServer, broker: RedisStreams, slot: str
):
    """A worker forwards the results of every model on the broker, also of models that it does not serve."""
    backend = ResultMemory()
    spec = broker.spec(slot)
    assert spec is not None
    broker._run(["SREM", "penstock:models", slot])
    with forwarding(shared_redis, broker, backend, refresh_s=0.05):
        wait_until(lambda: threading.active_count() > 1, 5, "it runs")
        broker.put_spec(slot, spec)
        ingress(broker).admit("first", model=slot, inputs=ROWS)
        finish(broker, claim(broker, slot)[0])
        assert backend.of("first")["model"] == slot


def test_a_stored_result_is_what_get_returns(app: Celery):
    """The result backend holds successes, failures by class and text, and revocations, as AsyncResult expects."""
    store = CeleryResultStore(app)
    store.succeeded("t-done", {"outputs": {"y": [[1.0]]}})
    store.failed("t-failed", ModelError("ValueError: no"))
    place = "model.py, line 7, in predict"
    store.failed("t-slow", ForwardTimeout("The forward took longer than its limit of 30 s"))
    store.failed("t-placed", job_failure("ModelError", "KeyError: 'k'", where=place))
    store.failed("t-traced", job_failure("ModelError", "KeyError: 'k'", where=place, traceback="the traceback"))
    store.revoked("t-revoked")

    def outcome(task_id: str) -> object:
        return app.AsyncResult(task_id).get(timeout=60, propagate=False)

    assert outcome("t-done") == {"outputs": {"y": [[1.0]]}}
    failure = outcome("t-failed")
    assert isinstance(failure, ModelError)
    assert str(failure) == "ValueError: no"
    assert isinstance(outcome("t-slow"), ForwardTimeout)
    assert isinstance(outcome("t-revoked"), TaskRevokedError)
    traces = [app.AsyncResult(task_id).traceback for task_id in ("t-failed", "t-placed", "t-traced")]
    assert traces == [
        None,
        f"Traceback (the last frame of the model):\n  {place}\nKeyError: 'k' ({place})",
        "the traceback",
    ]
