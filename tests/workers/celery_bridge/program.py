"""A Celery program, its worker and the task endpoint of a Penstock worker in one process; each step is asked for.

    signature --> queue -- take --> job -- run_jobs --> result -- forward --> follower -- work --> a task of the program

The messages, Celery's tracer, the result backend and the broker are real; only the loops around them are the test's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery, _state
from celery.canvas import Signature
from celery.result import AsyncResult, denied_join_result
from celery.worker.request import Request

from penstock.registry.broker.base import State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.queues import CELERY_TASK, lane_key
from penstock.workers.celery_bridge.result_store import CeleryResultStore
from penstock.workers.celery_bridge.task_ingress import InferRequest, InferTask
from penstock.workers.celery_bridge.task_results import TaskResultForwarder
from tests.servers import RedisServer
from tests.workers.celery_bridge.endpoint import ROWS, UNSIGNED, claim, finish, ingress, task_requests
from tests.workers.celery_bridge.jobs import HOST, application


class Program:
    """Both sides of one test, on queues of its own.

    Attributes:
        app: the program's application, with the tasks `after`, `total` and the errbacks; each notes its call.
        calls: the calls of those tasks in their order, as (task, arguments, request).
        worker_app: the application of the Penstock worker, which does not have the program's tasks.
    """

    def __init__(self, server: RedisServer, broker: RedisStreams, slot: str) -> None:
        self.server, self.broker, self.slot, self.redis = server, broker, slot, server.client()
        self.tasks, self.default = f"{slot}-tasks", f"{slot}-default"
        self.calls: list[tuple[str, tuple[Any, ...], Any]] = []
        self.app, self.worker_app = application(server), application(server)
        for app in (self.app, self.worker_app):
            app.conf.task_default_queue = self.default
            app.conf.task_routes = {CELERY_TASK: {"queue": self.tasks}}
        self.infer_task = self.worker_app.register_task(InferTask())
        self.infer_task.ingress = ingress(broker, server)
        self.forwarder = TaskResultForwarder(
            server.client(), broker, UNSIGNED, task_requests(server), CeleryResultStore(self.worker_app), worker="w1"
        )
        self._register_tasks()

    def _register_tasks(self) -> None:
        calls = self.calls

        def after(self: Any, *given: Any) -> Any:
            calls.append(("after", given, self.request))
            return given[-1]

        def on_error(self: Any, task_id: str) -> None:
            calls.append(("on_error", (task_id,), self.request))

        self.app.task(name="after", bind=True, shared=False)(after)
        self.app.task(name="on_error", bind=True, shared=False)(on_error)

    def infer(self, *args: Any, **options: Any) -> Signature:
        """A signature of `penstock.infer`; with `args` it has no inputs of its own."""
        kwargs = options.pop("kwargs", {})
        inputs = {} if args or options.pop("is_handed_on", False) else {"inputs": ROWS}
        arguments = {"model": self.slot, **inputs, **kwargs}
        return Signature(CELERY_TASK, args, arguments, options, app=self.app, queue=self.tasks)

    def after(self, *args: Any, **options: Any) -> Signature:
        """A signature of the program's task, without a queue."""
        return Signature("after", args, {}, options, app=self.app)

    def on_error(self) -> Signature:
        """A signature of the program's errback, which takes the id of the failed task."""
        return Signature("on_error", app=self.app)

    def take(self) -> Any:
        """The Penstock worker takes the next message; returns its request."""
        return self._execute(self.worker_app, self.tasks, InferRequest)

    def work(self, queue: str = "") -> Any:
        """The program's worker runs the next task of a queue, else of the default queue; returns the request."""
        return self._execute(self.app, queue or self.default, Request)

    def _execute(self, app: Celery, queue: str, request_class: type[Request]) -> Any:
        with app.connection_for_read() as connection, connection.SimpleQueue(queue) as waiting:
            message = waiting.get(timeout=180)
            task = app.tasks[message.headers["task"]]
            request = request_class(message, app=app, task=task, hostname=HOST)
            message.ack()
            with current_in_worker(app):
                request.execute()
            return request

    def waiting(self, queue: str = "") -> int:
        """How many messages wait in a queue; without a name, in the default queue of the program."""
        return int(self.redis.llen(queue or self.default))

    def run_jobs(self, state: State = State.COMPLETED, error: Failure | None = None) -> list[JobHeader]:
        """End the jobs that wait."""
        return [finish(self.broker, delivery, state, error) for delivery in claim(self.broker, self.slot)]

    def forward(self) -> None:
        """The Penstock worker ends the tasks whose jobs have ended."""
        while self.redis.xlen(lane_key(self.slot)):
            with current_in_worker(self.worker_app):
                self.forwarder._step()

    def infers(self, state: State = State.COMPLETED, error: Failure | None = None) -> Any:
        """The Penstock worker does all its work for the next message; returns the request."""
        request = self.take()
        self.run_jobs(state, error)
        self.forward()
        return request

    def meta(self, task_id: str) -> dict[str, Any]:
        """What the result backend holds of a task."""
        return dict(self.app.backend.get_task_meta(task_id, cache=False))

    def ended(self, result: AsyncResult) -> tuple[str, Any]:
        """The state of a task, and its result or its exception."""
        meta = self.meta(result.id)
        return meta["status"], meta["result"]

    def answer(self, task_id: str) -> dict[str, Any]:
        """What the endpoint answers to a task with ROWS."""
        outputs = {"y": [[2.0, 4.0, 6.0, 8.0]]}
        job_id = f"{self.slot}.{task_id}"
        return {"job_id": job_id, "model": self.slot, "version": "1", "content_hash": "", "outputs": outputs}


@contextmanager
def current_in_worker(app: Celery) -> Iterator[None]:
    """Inside the block `app` is Celery's current application, as in its worker: nested signatures need it."""
    before = _state._tls.current_app
    app.set_current()
    try:
        yield
    finally:
        _state._tls.current_app = before


@contextmanager
def program_on(server: RedisServer, broker: RedisStreams, slot: str) -> Iterator[Program]:
    """A program, and what a worker says to Celery: nothing here waits for results through a subscription."""
    program = Program(server, broker, slot)
    with denied_join_result(), program.redis, program.app, program.worker_app:
        yield program
        for app in (program.app, program.worker_app):
            # Celery subscribes to the tasks of a group, and their results unsubscribe when they are freed: too late.
            app.backend.result_consumer.subscribed_to.clear()
            app.backend.result_consumer.stop()
