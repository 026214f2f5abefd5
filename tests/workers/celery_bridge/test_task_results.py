"""The Celery task endpoint, outwards: from a finished job to Celery's result, with crashes in between."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from celery import chain

from penstock.registry.broker.base import State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Failure, Keyring
from penstock.registry.errors import JobFailed, ModelError, ResultGone
from penstock.registry.queues import GROUP, lane_key, record_key, task_request_key
from penstock.workers.celery_bridge.result_store import CeleryResultStore, Request
from penstock.workers.celery_bridge.task_results import TaskResultForwarder
from tests.payload_keys import sealing
from tests.servers import RedisServer, wait_until
from tests.workers.celery_bridge.endpoint import ROWS, UNSIGNED, claim, commit_of, finish, ingress, task_requests
from tests.workers.celery_bridge.program import Program


class ResultMemory:
    """Keeps results in memory. While `is_away` is set every call fails, as with a backend that does not answer."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.requests: list[Request | None] = []
        self.calls = 0
        self.is_away = False

    def _keep(self, task_id: str, outcome: Any, request: Request | None) -> None:
        self.calls += 1
        if self.is_away:
            raise ConnectionError("away")
        self.entries.append((task_id, outcome))
        self.requests.append(request)

    def succeeded(self, task_id: str, result: dict[str, Any], request: Request | None) -> None:
        self._keep(task_id, result, request)

    def failed(self, task_id: str, error: Exception, request: Request | None) -> None:
        self._keep(task_id, error, request)

    def revoked(self, task_id: str, reason: str, request: Request | None) -> None:
        self._keep(task_id, reason, request)

    def of(self, task_id: str) -> Any:
        return wait_until(
            lambda: next((outcome for known, outcome in self.entries if known == task_id), None), 10, f"{task_id} ends"
        )


@contextmanager
def forwarding(
    server: RedisServer, broker: RedisStreams, backend: ResultMemory, worker: str = "w1", **times_s: float
) -> Iterator[None]:
    forwarder = TaskResultForwarder(
        server.client(), broker, UNSIGNED, task_requests(server), backend, worker=worker, **times_s
    )
    forwarder.start()
    try:
        yield
    finally:
        forwarder.stop()


def forward(server: RedisServer, broker: RedisStreams, backend: ResultMemory, worker: str = "w1") -> None:
    """End the tasks of the entries that nothing has read yet, without a thread."""
    forwarder = TaskResultForwarder(server.client(), broker, UNSIGNED, task_requests(server), backend, worker=worker)
    forwarder._step()
    forwarder._step()


def test_every_end_of_a_job_reaches_celerys_backend(shared_redis: RedisServer, broker: RedisStreams, slot: str):
    """Results as nested lists, failures as exceptions with class and text, cancelled and expired jobs as revoked."""
    endpoint, backend = ingress(broker, shared_redis), ResultMemory()
    endpoint.admit("done", model=slot, inputs=ROWS)
    endpoint.admit("failed", model=slot, inputs=ROWS)
    endpoint.admit("cancelled", model=slot, inputs=ROWS)
    done, failed, cancelled = claim(broker, slot)
    finish(broker, done)
    finish(broker, failed, State.FAILED, Failure("ModelError", "ValueError: no"))
    finish(broker, cancelled, State.CANCELLED, Failure("Cancelled", "The job was revoked before it ran"))
    endpoint.admit("expired", model=slot, inputs=ROWS)
    finish(broker, claim(broker, slot)[0], State.EXPIRED, Failure("Expired", "The deadline passed before it ran"))
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
        assert backend.of("cancelled") == "cancelled"
        assert backend.of("expired") == "expired"
        with shared_redis.client() as client:
            wait_until(lambda: client.xlen(lane_key(slot)) == 0, 5, "the stream is empty")


@pytest.mark.parametrize("sealer", [sealing(UNSIGNED), UNSIGNED], ids=["sealed", "plain"])
@pytest.mark.parametrize("reader", [sealing(UNSIGNED), replace(sealing(UNSIGNED), seals=False)], ids=["seals", "reads"])
def test_sealed_payloads_do_not_come_to_celerys_backend(
    shared_redis: RedisServer, broker: RedisStreams, slot: str, sealer: Keyring, reader: Keyring
):
    """Not a sealed result, whoever reads it, and not a plain one where payloads are sealed: the task fails."""
    backend = ResultMemory()
    ingress(broker, shared_redis).admit("sealed", model=slot, inputs=ROWS)
    _, commit = commit_of(claim(broker, slot)[0], keyring=sealer)
    broker.exchange("c:1", [commit], [], 60_000)
    requests = task_requests(shared_redis)
    forwarder = TaskResultForwarder(shared_redis.client(), broker, reader, requests, backend, worker="w1")
    forwarder._step()
    forwarder._step()
    outcome = backend.of("sealed")
    if sealer.seals or reader.seals:
        assert isinstance(outcome, JobFailed)
        assert "The result cannot be read" in str(outcome)
    else:
        assert outcome["outputs"] == {"y": [[2.0, 4.0, 6.0, 8.0]]}


def test_results_wait_while_celerys_backend_is_away(shared_redis: RedisServer, broker: RedisStreams, slot: str):
    """The same worker stores a result again that could not be stored; its entry stays until then."""
    backend = ResultMemory()
    backend.is_away = True
    ingress(broker, shared_redis).admit("late", model=slot, inputs=ROWS)
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
    ingress(broker, shared_redis).admit("orphan", model=slot, inputs=ROWS)
    finish(broker, claim(broker, slot)[0])
    with forwarding(shared_redis, broker, dead, worker="w1", **times_s):
        wait_until(lambda: dead.calls, 10, "the first worker has it")
    with forwarding(shared_redis, broker, backend, worker=heir, **times_s):
        assert backend.of("orphan")["job_id"] == f"{slot}.orphan"


def test_consumers_of_dead_workers_are_deleted(shared_redis: RedisServer, broker: RedisStreams, slot: str):
    """Those without entries, once they make no call any more. One that holds an entry stays until it is abandoned."""
    endpoint, stream = ingress(broker, shared_redis), lane_key(slot)
    endpoint.admit("held", model=slot, inputs=ROWS)
    finish(broker, claim(broker, slot)[0])
    with shared_redis.client() as client:
        client.xgroup_create(stream, GROUP, id="0")
        client.xgroup_createconsumer(stream, GROUP, "dead")
        client.xreadgroup(GROUP, "holding", {stream: ">"})

        def consumers() -> set[bytes]:
            return {each["name"] for each in client.xinfo_consumers(stream, GROUP)}

        assert consumers() == {b"dead", b"holding"}
        backend = ResultMemory()
        with forwarding(shared_redis, broker, backend, refresh_s=0.01, left_s=0.05):
            wait_until(lambda: b"dead" not in consumers(), 30, "the consumer without entries is deleted")
            assert b"holding" in consumers()
        assert not backend.calls
        with forwarding(shared_redis, broker, backend, refresh_s=0.01, left_s=0.05, abandoned_s=0.05):
            assert backend.of("held")["job_id"] == f"{slot}.held"
            wait_until(lambda: b"holding" not in consumers(), 30, "the other consumer is deleted")


def test_a_result_that_expired_unseen_is_a_failure_and_not_a_hang(
    shared_redis: RedisServer, broker: RedisStreams, slot: str
):
    """The entry outlives the record: `AsyncResult.get` raises ResultGone."""
    backend = ResultMemory()
    ingress(broker, shared_redis).admit("gone", model=slot, inputs=ROWS)
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
        ingress(broker, shared_redis).admit("first", model=slot, inputs=ROWS)
        finish(broker, claim(broker, slot)[0])
        assert backend.of("first")["model"] == slot


# How often followers are sent


def test_a_worker_that_dies_after_a_commit_leaves_the_followers_to_the_next(program: Program):
    """The commit writes the result and its place in the stream in one step; nothing else is in memory only."""
    last = chain(program.infer(), program.after("end"), app=program.app).apply_async()
    program.take()
    program.run_jobs()
    dead = ResultMemory()
    dead.is_away = True
    with pytest.raises(ConnectionError):
        forward(program.server, program.broker, dead)
    assert (dead.calls, program.waiting()) == (1, 0)
    program.forward()
    program.work()
    assert program.ended(last) == ("SUCCESS", "end")


def test_a_worker_that_dies_before_it_settles_a_task_has_its_followers_sent_again(program: Program):
    """At least once: the next worker repeats what was not settled. The next step of a chain keeps its task id."""
    last = chain(program.infer(), program.after("end"), app=program.app).apply_async()
    first = program.take()
    (job,) = program.run_jobs()
    requests = task_requests(program.server)
    (kept,) = requests.find([job.id])
    assert kept is not None
    store = CeleryResultStore(program.worker_app)
    store.succeeded(first.id, program.answer(first.id), requests.opened(job.id, kept))
    program.forward()
    assert [program.work().id, program.work().id] == [last.id, last.id]
    assert program.ended(first) == ("SUCCESS", program.answer(first.id))


def test_a_settled_task_is_not_followed_again(program: Program):
    """Neither when its message is delivered again, nor when its entry is read again after a crash."""
    chain(program.infer(), program.after("end"), app=program.app).apply_async()
    (message,) = program.redis.lrange(program.tasks, 0, -1)
    first = program.infers()
    program.redis.lpush(program.tasks, message)
    assert program.take().id == first.id
    assert program.run_jobs() == []
    program.redis.xadd(lane_key(program.slot), {first.id: b""})
    program.forward()
    assert program.waiting() == 1


def test_a_crash_inside_an_entry_repeats_only_what_was_not_settled(
    shared_redis: RedisServer, broker: RedisStreams, slot: str
):
    """Jobs of one commit share an entry. Each task is settled by itself, so the first one is not followed again."""
    endpoint, backend = ingress(broker, shared_redis), ResultMemory()
    for task_id in ("one", "two"):
        endpoint.admit(task_id, model=slot, inputs=ROWS, request={"id": task_id})
    requests = task_requests(shared_redis)
    broker.exchange("c:1", [commit_of(delivery)[1] for delivery in claim(broker, slot)], [], 60_000)
    requests.settled(f"{slot}.one")
    forward(shared_redis, broker, backend)
    assert dict(zip([task_id for task_id, _ in backend.entries], backend.requests, strict=True)) == {
        "one": None,
        "two": {"id": "two"},
    }
    assert requests.find([f"{slot}.one", f"{slot}.two"]) == [None, None]


def test_a_request_with_a_wrong_signature_fails_the_task(shared_redis: RedisServer, broker: RedisStreams, slot: str):
    """Who can write to the broker cannot have a worker send tasks to Celery's queues."""
    backend = ResultMemory()
    ingress(broker, shared_redis).admit("forged", model=slot, inputs=ROWS, request={"id": "forged"})
    header = finish(broker, claim(broker, slot)[0])
    with shared_redis.client() as client:
        client.set(task_request_key(header.id), b'k1\n00\n{"callbacks": []}')
    forward(shared_redis, broker, backend)
    assert "lacks the signature" in str(backend.of("forged"))
    assert backend.requests == [None]


def test_a_foreign_key_holds_up_no_other_models_results(shared_redis: RedisServer, broker: RedisStreams, slot: str):
    """A model without a live worker, whose stream of results another program has overwritten: it is quarantined."""
    backend, other = ResultMemory(), f"{slot}-abandoned"
    broker.put_spec(other, b"{}")
    ingress(broker, shared_redis).admit("late", model=slot, inputs=ROWS)
    finish(broker, claim(broker, slot)[0])
    with shared_redis.client() as client:
        client.set(lane_key(other), "of another program")
        with forwarding(shared_redis, broker, backend, retry_s=0.05):
            assert backend.of("late")["outputs"] == {"y": [[2.0, 4.0, 6.0, 8.0]]}
        assert client.type(lane_key(other)) == b"stream"
    assert [(each.key, each.kind) for each in broker.quarantined(other)] == [(lane_key(other), "string")]
