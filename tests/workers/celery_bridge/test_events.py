"""Task events, against Celery's own receiver, its own picture of a cluster, and a real broker."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.worker import state as worker_state
from celery.worker.control import Panel
from kombu.entity import Exchange, Queue
from kombu.messaging import Producer
from msgspec import structs
from redis.connection import AbstractConnection

from penstock.registry.broker.base import State
from penstock.registry.envelope import Failure
from penstock.registry.queues import new_job_id
from penstock.registry.tensors import Tensor
from penstock.workers.celery_bridge.events import CeleryEventSender, TaskEventsFlag
from penstock.workers.celery_bridge.presentation import shown_arguments, shown_name
from penstock.workers.observe.listener import Failed
from tests.servers import RedisServer, wait_until
from tests.workers.celery_bridge.jobs import HOST, application, ended, job
from tests.workers.celery_bridge.monitor import monitoring

FAILURE = Failure("ModelError", "ValueError: no", "model.py, line 7, in predict", "Traceback\nValueError: no")


@contextmanager
def watching(
    app: Celery,
    is_wanted: Callable[[], bool] = lambda: True,
    interval_s: float = 0.01,
    max_buffered: int = 20_000,
) -> Iterator[CeleryEventSender]:
    listener = CeleryEventSender(app, HOST, interval_s=interval_s, is_wanted=is_wanted, max_buffered=max_buffered)
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
        listener.finished([ended(gone, end, FAILURE)], 1001.0)
        task = monitor.task(gone.id, state)
    if state == "FAILURE":
        assert task.exception == "ModelError('ValueError: no')"
        assert task.traceback == FAILURE.traceback
    else:
        assert monitor.events[-1]["expired"] is (end is State.EXPIRED)


def test_a_failed_forward_of_a_job_that_runs_again_shows_as_a_retry(app: Celery):
    """Between its forwards the task is in retry, with the error of the last one; then it ends as usual."""
    failing = job()
    with monitoring(app) as monitor, watching(app) as listener:
        listener.received([failing], 1000.0)
        listener.started([failing], 1001.0)
        listener.retried([Failed(failing, FAILURE)], 1002.0)
        task = monitor.task(failing.id, "RETRY")
        assert (task.retried, task.exception) == (1002.0, "ModelError('ValueError: no')")
        assert task.traceback == FAILURE.traceback
        listener.started([failing], 1003.0)
        listener.finished([ended(failing)], 1004.0)
        task = monitor.task(failing.id, "SUCCESS")
    assert task.succeeded == 1004.0


def test_the_job_of_a_task_goes_on_as_that_task(app: Celery):
    """Celery's consumer has reported the task as received. Its start, its pause and its end have the id of the task,
    and no event has the id of the job: monitors see one task.
    """
    through_celery = job(is_task=True, local_id="b6f1c0de-task")
    with monitoring(app) as monitor, watching(app) as listener:
        listener.received([through_celery], 1000.0)
        listener.started([through_celery], 1001.0)
        listener.retried([Failed(through_celery, Failure("ModelError", "ValueError: not now"))], 1002.0)
        listener.started([through_celery], 1003.0)
        listener.finished([ended(through_celery)], 1004.0)
        monitor.task("b6f1c0de-task", "SUCCESS")
    assert [(event["type"], event["uuid"]) for event in monitor.events] == [
        ("task-started", "b6f1c0de-task"),
        ("task-retried", "b6f1c0de-task"),
        ("task-started", "b6f1c0de-task"),
        ("task-succeeded", "b6f1c0de-task"),
    ]


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


def test_each_description_is_encoded_once_and_each_job_has_its_own(app: Celery):
    """Jobs of many tenants, priorities and shapes come in any order. Each is shown with its own description."""
    contents = [(Tensor("x", "float32", (rows, 384)),) for rows in (1, 2)]
    jobs = [
        structs.replace(job(model), tenant=tenant, priority=priority, content=content)
        for _ in range(4)
        for content in contents
        for model in ("mlp", "mlp-b")
        for priority in ("high", "low")
        for tenant in ("acme", "globex")
    ]
    expected = {each.id: (shown_name(each.model), shown_arguments(each)) for each in jobs}
    with monitoring(app) as monitor, watching(app) as listener:
        descriptions = [*listener._receptions(jobs, 1000.0, 1)]
        listener.received(jobs, 1000.0)
        wait_until(lambda: len(monitor.events) >= len(jobs), 10, "all events are seen")
    assert {event["uuid"]: (event["name"], event["kwargs"]) for event in monitor.events} == expected
    assert len(descriptions) == len(set(expected.values())) == 16


def test_nothing_is_sent_while_events_are_off(app: Celery):
    """Events follow the flag in both directions. Jobs that end while it is off are counted, and not sent later."""
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
    """While Celery's broker is dead, the drain's thread never speaks to it, and events are dropped and counted."""
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


def test_a_frozen_broker_fills_a_bounded_buffer(redis_server: RedisServer):
    """While Celery's broker never answers, the buffer is bounded, and further events are dropped and counted."""
    redis_server.pause()
    with watching(application(redis_server), interval_s=60, max_buffered=100) as listener:
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


def test_disable_events_counts_although_the_dispatcher_stays_enabled(app: Celery):
    """Celery's dispatcher stays `enabled` while task events are off. The flag follows its groups, which Celery's own
    commands change.
    """
    with app.connection_for_write() as connection:
        dispatcher = app.events.Dispatcher(connection, hostname=HOST, groups=None)
        consumer = SimpleNamespace(event_dispatcher=None)
        is_on = TaskEventsFlag(SimpleNamespace(task_events=True, consumer=consumer))
        assert is_on()
        consumer.event_dispatcher = dispatcher
        assert is_on()
        Panel.data["disable_events"](SimpleNamespace(consumer=consumer))
        assert dispatcher.enabled
        assert not is_on()
        consumer.event_dispatcher = None
        assert not is_on()
        consumer.event_dispatcher = dispatcher
        Panel.data["enable_events"](SimpleNamespace(consumer=consumer))
        assert is_on()


def test_a_message_leaves_the_events_exchange_for_its_own_routing_key(app: Celery, shared_redis: RedisServer):
    """A monitor that subscribes to task events only receives ours under `task.multi`."""
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
                connection.drain_events(timeout=180)
    headers, events = seen[0]
    assert headers["hostname"] == HOST
    assert [event["type"] for event in events] == ["task-received"]


def test_celerys_own_producer_and_ours_reach_the_same_receiver(app: Celery):
    """Celery's dispatcher sends worker events, the bridge sends task events: one monitor sees both."""
    with monitoring(app) as monitor, watching(app) as listener, app.connection_for_write() as connection:
        with app.events.Dispatcher(connection, hostname=HOST) as dispatcher:
            assert isinstance(dispatcher.producer, Producer)
            dispatcher.send("worker-online", freq=2)
        listener.received([job()], 1000.0)
        wait_until(
            lambda: {event["type"] for event in monitor.events} >= {"worker-online", "task-received"}, 10, "both"
        )
