"""The bridge to Celery, against Celery's own receiver, its own picture of a cluster, and a real broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.events.state import State as ClusterState
from celery.exceptions import InvalidTaskError, TaskRevokedError
from celery.worker import heartbeat
from celery.worker import state as worker_state
from celery.worker.control import Panel
from kombu.entity import Exchange, Queue
from kombu.messaging import Producer
from redis.connection import AbstractConnection

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure, JobHeader, Options
from penstock.registry.errors import ModelError
from penstock.registry.queues import new_job_id
from penstock.registry.tensors import Tensor
from penstock.workers.celery_bridge import bridge
from penstock.workers.celery_bridge.bridge import (
    OPEN_COMMANDS,
    CeleryEventSender,
    CeleryResultStore,
    InferRequest,
    TaskEventsFlag,
    show_drain,
    withdraw_commands,
)
from penstock.workers.observe.listener import Ended, Failed
from tests.servers import RedisServer, wait_until

HOST = "cpu0@test"
CANARY = "canary-payload"


def job(model: str = "mlp", *, lane: bool = False, local_id: str = "") -> JobHeader:
    content = (Tensor("x", "float32", (1, 384)),)
    job_id = f"{model}.{local_id}" if local_id else new_job_id(model)
    return JobHeader(job_id, "acme", model, "high", content, options=Options(lane=lane))


def ended(header: JobHeader, state: State = State.COMPLETED, error: Failure | None = None) -> Ended:
    return Ended(header, state, 0.25, error, "1")


@pytest.fixture
def app(shared_redis: RedisServer) -> Celery:
    return application(shared_redis)


def application(server: RedisServer) -> Celery:
    app = Celery("test", broker=server.celery_url, backend=server.celery_url, set_as_current=False)
    app.conf.broker_transport_options = {"socket_timeout": 5}
    return app


@pytest.fixture(autouse=True)
def _celery_as_found() -> Iterator[None]:
    """Celery's tables are the process's own: give them back as they were."""
    data, meta = dict(Panel.data), dict(Panel.meta)
    yield
    Panel.data.clear()
    Panel.data.update(data)
    Panel.meta.update(meta)
    heartbeat.active_requests = worker_state.active_requests
    heartbeat.all_total_count = worker_state.all_total_count
    worker_state.reset_state()


class Monitor:
    """Celery's own picture of the cluster, fed by its own receiver."""

    def __init__(self) -> None:
        self.state = ClusterState()
        self.events: list[dict[str, Any]] = []

    def see(self, event: dict[str, Any]) -> None:
        self.events.append(dict(event))
        self.state.event(event)

    def task(self, uuid: str, state: str) -> Any:
        return wait_until(
            lambda: (task := self.state.tasks.get(uuid)) is not None and task.state == state and task,
            10,
            f"task {uuid} is {state}",
        )


@contextmanager
def monitoring(app: Celery) -> Iterator[Monitor]:
    monitor = Monitor()
    is_open, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": monitor.see})
            with connection.Consumer(receiver.queue, callbacks=[receiver._receive], no_ack=True):
                is_open.set()
                while not is_over.is_set():
                    try:
                        connection.drain_events(timeout=0.1)
                    except TimeoutError:
                        continue

    thread = threading.Thread(target=watch)
    thread.start()
    assert is_open.wait(10)
    try:
        yield monitor
    finally:
        is_over.set()
        thread.join()


@contextmanager
def watching(
    app: Celery, is_wanted: Callable[[], bool] = lambda: True, interval_s: float = 0.01
) -> Iterator[CeleryEventSender]:
    listener = CeleryEventSender(app, HOST, interval_s=interval_s, is_wanted=is_wanted)
    listener.start()
    try:
        yield listener
    finally:
        listener.stop()


def test_a_job_appears_to_monitors_with_its_model_times_and_outcome_but_not_its_payload(app: Celery):
    """Received, started and succeeded events carry what Flower shows: name, arguments' shapes, runtime, version."""
    done, at = job(), time.time()
    with monitoring(app) as monitor, watching(app) as listener:
        listener.received([done], at)
        listener.started([done], at + 1)
        listener.finished([ended(done)], at + 2)
        task = monitor.task(done.id, "SUCCESS")
    assert task.name == "penstock.infer.mlp"
    assert (task.received, task.started, task.succeeded) == (at, at + 1, at + 2)
    assert (task.args, task.runtime, task.result) == ("()", 0.25, "version 1")
    assert task.kwargs == "{'tenant': 'acme', 'priority': 'high', 'x': 'float32 (1, 384)'}"
    assert task.worker.hostname == HOST
    assert [worker.hostname for worker in monitor.state.alive_workers()] == [HOST]


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (State.FAILED, "FAILURE"),
        (State.DEAD, "FAILURE"),
        (State.CANCELLED, "REVOKED"),
        (State.EXPIRED, "REVOKED"),
    ],
)
def test_every_end_of_a_job_has_its_state_in_celery(app: Celery, end: State, state: str):
    """Failures and dead letters are failed tasks with the error's text; cancelled and expired jobs are revoked."""
    gone = job()
    with monitoring(app) as monitor, watching(app) as listener:
        listener.received([gone], 1000.0)
        listener.finished([ended(gone, end, Failure("ModelError", "ValueError: no"))], 1001.0)
        task = monitor.task(gone.id, state)
    if state == "FAILURE":
        assert task.exception == "ModelError('ValueError: no')"
    else:
        assert monitor.events[-1]["expired"] is (end is State.EXPIRED)


def test_a_failed_forward_of_a_job_that_runs_again_shows_as_a_retry(app: Celery):
    """Until it runs again the task is in retry, with what the forward failed of; its end is its own."""
    failing = job()
    with monitoring(app) as monitor, watching(app) as listener:
        listener.received([failing], 1000.0)
        listener.started([failing], 1001.0)
        listener.retried([Failed(failing, Failure("ModelError", "ValueError: not now"))], 1002.0)
        task = monitor.task(failing.id, "RETRY")
        assert (task.retried, task.exception) == (1002.0, "ModelError('ValueError: not now')")
        listener.started([failing], 1003.0)
        listener.finished([ended(failing)], 1004.0)
        task = monitor.task(failing.id, "SUCCESS")
    assert task.succeeded == 1004.0


def test_the_task_that_brought_a_lane_job_ends_with_it(app: Celery):
    """The sender of a task looks for the task's id, not for the job's: both end in the monitor."""
    through_celery = job(lane=True, local_id="b6f1c0de-task")
    with monitoring(app) as monitor, watching(app) as listener:
        listener.received([through_celery], 1000.0)
        listener.finished([ended(through_celery)], 1001.0)
        monitor.task("mlp.b6f1c0de-task", "SUCCESS")
        monitor.task("b6f1c0de-task", "SUCCESS")


def test_batches_of_jobs_travel_as_a_few_compressed_messages(app: Celery):
    """Thousands of events leave as one message per flush, and none is lost or changed on the way."""
    batches = [[job() for _ in range(64)] for _ in range(20)]
    with monitoring(app) as monitor, watching(app, interval_s=0.2) as listener:
        for batch in batches:
            listener.received(batch, 1000.0)
            listener.started(batch, 1000.5)
            listener.finished([ended(header) for header in batch], 1001.0)
        wait_until(lambda: len(monitor.events) >= 20 * 64 * 3, 10, "all events are seen")
    assert len(monitor.events) == 20 * 64 * 3
    # Events of one flush share its clock.
    assert len({event["clock"] for event in monitor.events}) <= 3
    assert {task.state for task in monitor.state.tasks.values()} == {"SUCCESS"}
    assert listener.totals == {"penstock.infer.mlp": 20 * 64}
    assert listener.dropped == 0


def test_nothing_is_sent_while_events_are_off(app: Celery):
    """The switch is followed both ways, and jobs that ended meanwhile are counted, not sent late."""
    is_on = [False]
    unseen, seen = job(), job()
    with monitoring(app) as monitor, watching(app, lambda: is_on[0]) as listener:
        listener.finished([ended(unseen)], 1000.0)
        is_on[0] = True

        def seen_again() -> Any:
            listener.finished([ended(seen)], 1001.0)
            return seen.id in monitor.state.tasks

        wait_until(seen_again, 10, "events flow again")
    assert unseen.id not in monitor.state.tasks
    assert listener.totals["penstock.infer.mlp"] >= 2


def test_a_broker_that_is_away_costs_events_and_nothing_else(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
):
    """While Celery's broker is dead the drain's thread never speaks to it, events are counted as dropped, and the next
    ones arrive when it is back.
    """
    app = application(redis_server)
    with watching(app) as listener:
        listener.received([job()], time.time())
        redis_server.kill()
        speaking: set[int] = set()
        connect = AbstractConnection.connect

        def connect_and_note(self: AbstractConnection) -> None:
            speaking.add(threading.get_ident())
            connect(self)

        monkeypatch.setattr(AbstractConnection, "connect", connect_and_note)

        def drops() -> bool:
            listener.received([job()] * 64, time.time())
            return listener.dropped > 0 and bool(speaking)

        wait_until(drops, 20, "events are dropped")
        assert threading.get_ident() not in speaking
        monkeypatch.undo()
        redis_server.restart()
        with monitoring(app) as monitor:
            late = job()

            def arrives() -> bool:
                listener.finished([ended(late)], time.time())
                return late.id in monitor.state.tasks

            wait_until(arrives, 20, "events arrive again")


def test_a_frozen_broker_fills_a_bounded_buffer(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch):
    """With a broker that accepts and never answers, memory is bounded and the rest is dropped and counted."""
    monkeypatch.setattr(bridge, "MAX_BUFFERED", 100)
    redis_server.pause()
    with watching(application(redis_server), interval_s=60) as listener:
        for _ in range(5):
            listener.received([job()] * 50, time.time())
        assert listener.dropped == 150
        redis_server.resume()


def test_a_revoked_id_is_known_as_job_and_as_task():
    """`control revoke` takes a job's id, or the id of the task that brought it."""
    listener = CeleryEventSender(Celery(set_as_current=False), HOST, interval_s=1, is_wanted=lambda: True)
    assert not listener.is_revoked("mlp.one")
    worker_state.revoked.update(["mlp.one", "two"])
    assert listener.is_revoked("mlp.one")
    assert listener.is_revoked("mlp.two")
    assert not listener.is_revoked("mlp.three")


def test_disable_events_is_believed_although_the_dispatcher_stays_enabled(app: Celery):
    """Celery's dispatcher says `enabled` with task events off; the switch reads its groups, and lets Celery's own
    commands change them.
    """
    with app.connection_for_write() as connection:
        dispatcher = app.events.Dispatcher(connection, hostname=HOST, groups=None)
        consumer = SimpleNamespace(event_dispatcher=None)
        switch = TaskEventsFlag(SimpleNamespace(task_events=True, consumer=consumer))
        assert switch()
        consumer.event_dispatcher = dispatcher
        assert switch()
        Panel.data["disable_events"](SimpleNamespace(consumer=consumer))
        assert dispatcher.enabled
        assert not switch()
        consumer.event_dispatcher = None
        assert not switch()
        consumer.event_dispatcher = dispatcher
        Panel.data["enable_events"](SimpleNamespace(consumer=consumer))
        assert switch()


class Held:
    """What a drain holds."""

    def __init__(self, active: Sequence[JobHeader], reserved: Sequence[JobHeader]) -> None:
        self._active, self._reserved = list(active), list(reserved)

    def active(self) -> list[JobHeader]:
        return self._active

    def reserved(self) -> list[JobHeader]:
        return self._reserved


def test_inspect_tells_of_the_drains_jobs(app: Celery):
    """`active`, `reserved` and `stats` show what the drain holds and has done, without payloads."""
    listener = CeleryEventSender(app, HOST, interval_s=1, is_wanted=lambda: False)
    running, waiting = job(), job("minilm")
    show_drain(Held([running], [waiting]), listener, HOST, settings={})
    listener.finished([ended(job()), ended(job())], 1000.0)

    controller = SimpleNamespace(stats=lambda: {"total": {"penstock.infer": 1}, "pid": 1})
    state = SimpleNamespace(tset=set, consumer=SimpleNamespace(controller=controller))
    (active,) = Panel.data["active"](state, safe=True)
    (reserved,) = Panel.data["dump_reserved"](state)
    stats = Panel.data["stats"](state)

    assert (active["id"], active["name"], active["hostname"]) == (running.id, "penstock.infer.mlp", HOST)
    assert (reserved["id"], reserved["name"]) == (waiting.id, "penstock.infer.minilm")
    assert stats["total"] == {"penstock.infer": 1, "penstock.infer.mlp": 2}
    assert stats["pid"] == 1


def test_celerys_heartbeat_counts_the_drains_jobs(app: Celery):
    """Flower's column of active tasks comes from the heartbeat."""
    listener = CeleryEventSender(app, HOST, interval_s=1, is_wanted=lambda: False)
    show_drain(Held([job(), job()], []), listener, HOST, settings={})
    listener.finished([ended(job())], 1000.0)
    sent: list[dict[str, Any]] = []
    eventer = SimpleNamespace(
        on_enabled=set(), on_disabled=set(), send=lambda event, **fields: sent.append({"type": event, **fields})
    )
    heartbeat.Heart(None, eventer)._send("worker-heartbeat")
    assert (sent[0]["active"], sent[0]["processed"]) == (2, 1)


def test_only_commands_that_look_or_revoke_stay_open():
    """Whatever this version of Celery offers, what stops, resizes or re-routes a worker is gone."""
    withdraw_commands()
    assert set(Panel.data) <= OPEN_COMMANDS
    for name in ("ping", "stats", "active", "reserved", "revoked", "revoke", "enable_events", "disable_events"):
        assert name in Panel.data
    for name in ("shutdown", "pool_grow", "pool_restart", "autoscale", "add_consumer", "cancel_consumer", "terminate"):
        assert name not in Panel.data


def request_of(app: Celery, payload: object) -> InferRequest:
    """The request that a worker of `app` would make of a message with this payload."""

    def infer() -> None:
        """Stands for the lane's task."""

    task = app.task(name="penstock.infer")(infer)
    message = SimpleNamespace(
        headers={"id": "t1", "task": "penstock.infer", "kwargsrepr": CANARY, "argsrepr": CANARY},
        body=b"",
        payload=payload,
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={},
        properties={},
    )
    return InferRequest(message, app=app, hostname=HOST, task=task)


def test_the_request_of_a_lane_task_shows_nobody_its_payload(app: Celery):
    """Neither Celery's events, which carry argsrepr and kwargsrepr, nor `inspect active` nor repr have the inputs."""
    request = request_of(app, [[], {"model": "mlp", "inputs": {"x": CANARY}}, {}])
    shown = [request.argsrepr, request.kwargsrepr, request.info(), request.info(safe=True), repr(request)]
    shown += [request.request_dict["argsrepr"], request.request_dict["kwargsrepr"]]
    assert CANARY not in repr(shown)
    assert request.kwargsrepr == "{'model': 'mlp'}"


@pytest.mark.parametrize("payload", [[1], 7, None, {"a": 1}, "text"])
def test_a_payload_that_is_no_task_is_an_invalid_task_and_no_crash(app: Celery, payload: object):
    """Celery drops an InvalidTaskError; anything else would end the worker."""
    with pytest.raises(InvalidTaskError):
        request_of(app, payload)


def test_a_stored_result_is_what_get_returns(app: Celery):
    """The result backend holds successes, failures by class and text, and revocations, as AsyncResult expects."""
    store = CeleryResultStore(app)
    store.succeeded("t-done", {"outputs": {"y": [[1.0]]}})
    store.failed("t-failed", ModelError("ValueError: no"))
    store.revoked("t-revoked")

    def outcome(task_id: str) -> object:
        return app.AsyncResult(task_id).get(timeout=5, propagate=False)

    assert outcome("t-done") == {"outputs": {"y": [[1.0]]}}
    failure = outcome("t-failed")
    assert isinstance(failure, ModelError)
    assert str(failure) == "ValueError: no"
    assert isinstance(outcome("t-revoked"), TaskRevokedError)


def test_a_message_leaves_the_events_exchange_for_its_own_routing_key(app: Celery, shared_redis: RedisServer):
    """Monitors that listen to a part of the events find ours under `task.multi`."""
    with app.connection_for_read() as connection:
        exchange = Exchange("celeryev", type="fanout")
        queue = Queue(f"test-{new_job_id('q')}", exchange, routing_key="task.#", auto_delete=True)
        seen: list[Any] = []
        with (
            connection.Consumer(
                queue, callbacks=[lambda body, message: seen.append((message.headers, body))], no_ack=True
            ),
            watching(app) as listener,
        ):
            listener.received([job()], 1000.0)
            while not seen:
                connection.drain_events(timeout=5)
    headers, events = seen[0]
    assert headers["hostname"] == HOST
    assert [event["type"] for event in events] == ["task-received"]


def test_celerys_own_producer_and_ours_reach_the_same_receiver(app: Celery):
    """Worker events come from Celery's dispatcher, task events from us: one monitor sees both."""
    with monitoring(app) as monitor, watching(app) as listener, app.connection_for_write() as connection:
        with app.events.Dispatcher(connection, hostname=HOST) as dispatcher:
            assert isinstance(dispatcher.producer, Producer)
            dispatcher.send("worker-online", freq=2)
        listener.received([job()], 1000.0)
        wait_until(
            lambda: {event["type"] for event in monitor.events} >= {"worker-online", "task-received"}, 10, "both"
        )
