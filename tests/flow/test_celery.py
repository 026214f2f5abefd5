"""A worker under Celery and Flower: send_task and get, inspect, revoke, events, shutdown, and refusals."""

from __future__ import annotations

import base64
import json
import os
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from celery import Celery, chain, chord
from celery.canvas import Signature
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult

from penstock import Client
from penstock.registry.envelope import Keyring
from penstock.registry.errors import Cancelled, ModelError, UnknownJob
from penstock.registry.package import load_package
from penstock.registry.queues import CELERY_QUEUE, lane_key
from tests.conftest import StartWorker
from tests.flow.conftest import Fleet, Samples
from tests.packages import recorded_forwards, write_double, write_package, write_raiser, write_recorder, write_sleeper
from tests.servers import ROOT, Process, RedisServer, WorkerProcess, free_port, require, wait_until
from tests.workers.celery_bridge.monitor import monitoring

ROW = [[1.0, 2.0, 3.0, 4.0]]
TWICE = [[2.0, 4.0, 6.0, 8.0]]
CANARY = 987654.25
"""A number that must appear in no log, event or inspection."""


def celery_of(server: RedisServer) -> Celery:
    """A Celery program that knows the broker and does not import Penstock."""
    return Celery("program", broker=server.celery_url, backend=server.celery_url, set_as_current=False)


def send(app: Celery, model: str, x: Any = ROW, *, task_id: str = "", queue: str = "penstock", **kwargs: Any) -> str:
    """Send a task as a Celery program does; returns the task's id."""
    task_id = task_id or str(uuid4())
    arguments = {"model": model, "inputs": {"x": x}, **kwargs}
    _let_go(app.send_task("penstock.infer", task_id=task_id, queue=queue, kwargs=arguments))
    return task_id


def outcome(app: Celery, task_id: str, timeout_s: float = 20) -> Any:
    """The value or the exception of AsyncResult.get. Both are returned: a raised one would keep the result alive."""
    result = app.AsyncResult(task_id)
    try:
        return result.get(timeout=timeout_s, propagate=False)
    finally:
        _let_go(result)


def _let_go(result: AsyncResult) -> None:
    """Unsubscribe now: Celery does so when the object is freed, possibly after the end of its server."""
    result.backend.remove_pending_result(result)
    result.backend = None


def consumes(app: Celery, worker: WorkerProcess) -> None:
    """Wait until Celery's side of the worker answers: it starts after the drain."""

    answers(app, worker.name)


def answers(app: Celery, name: str) -> None:
    """Wait until the worker of that name answers a ping."""

    def ping() -> Any:
        # Not from the pool, whose connections may be to a server that has died since.
        with app.connection_for_write() as connection:
            return app.control.ping(destination=[name], timeout=0.5, connection=connection)

    wait_until(ping, 20, "the worker answers a ping")


def test_any_celery_program_sends_a_task_and_gets_the_outputs(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """AsyncResult.get returns id, model, version, hash and outputs; failures and bad input raise with their text."""
    write_double(models_root, "task-double")
    write_raiser(models_root, "task-raiser")
    app = celery_of(shared_redis)
    worker = start_worker(shared_redis, models_root)

    done = send(app, "task-double", priority="high", tenant="acme")
    assert outcome(app, done) == {
        "job_id": f"task-double.{done}",
        "model": "task-double",
        "version": "1",
        "content_hash": load_package(models_root / "task-double" / "1").manifest().content_hash,
        "outputs": {"y": TWICE},
    }
    with Client(shared_redis.url, tenant="acme") as client:
        assert client.job(f"task-double.{done}").result(timeout=180)["y"].tolist() == TWICE

    raising = send(app, "task-raiser", [[-1.0, 0.0, 0.0, 0.0]])
    failure = outcome(app, raising)
    assert isinstance(failure, ModelError)
    assert str(failure) == "ValueError: a negative row (model.py, line 5, in forward)"
    assert "model.py, line 5, in forward" in app.AsyncResult(raising).traceback
    counted = {("task-double", "celery"): 1, ("task-raiser", "celery"): 1}
    wait_until(lambda: Samples(worker).of("infer_requests_total") == counted, 60, "both are counted as Celery's")
    for change, text in (
        ({"model": "missing"}, "Unknown model 'missing'"),
        ({"model": "task-double", "priority": "urgent"}, "Unknown priority 'urgent'"),
        ({"model": "task-double", "x": [[1.0, CANARY]]}, "x: shape (1, 2). Expected (batch, 4)"),
        ({"model": "task-double", "surprise": 1}, "unexpected keyword argument 'surprise'"),
    ):
        refused = outcome(app, send(app, **change))
        assert isinstance(refused, Exception)
        assert text in str(refused)
    assert str(CANARY) not in worker.output.read_text()


def test_a_task_that_celery_delivers_twice_runs_once(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, tmp_path: Path
):
    """The job's id is made from the task's id, so that the broker recognises a repeated message."""
    forward_log = tmp_path / "forward_log"
    write_recorder(models_root, forward_log, "lane-recorder")
    app = celery_of(shared_redis)
    start_worker(shared_redis, models_root)
    for _ in range(3):
        send(app, "lane-recorder", task_id="same-task")
    last = send(app, "lane-recorder", [[5.0, 0.0, 0.0, 0.0]])
    assert outcome(app, last)["outputs"] == {"y": [[10.0, 0.0, 0.0, 0.0]]}
    assert outcome(app, "same-task")["outputs"] == {"y": TWICE}
    assert sum(rows.count(1.0) for rows in recorded_forwards(forward_log)) == 1


def test_results_of_tasks_survive_the_worker(redis_server: RedisServer, models_root: Path, start_worker: StartWorker):
    """After kill -9 with running and waiting jobs of tasks, another worker runs them, and every get returns."""
    write_sleeper(models_root, "task-sleeper", forward_s=0.2, max_batch_size=2)
    app = celery_of(redis_server)
    first = start_worker(redis_server, models_root)
    sent = [send(app, "task-sleeper", [[float(n), 0.0, 0.0, 0.0]]) for n in range(12)]
    outcome(app, sent[0])
    first.kill()
    start_worker(redis_server, models_root)
    answers = [outcome(app, task_id, 90) for task_id in sent]
    assert [answer["outputs"]["y"][0][0] for answer in answers] == [2.0 * n for n in range(12)]
    with redis_server.client() as client:
        wait_until(lambda: client.xlen(lane_key("task-sleeper")) == 0, 15, "the stream is empty")


def test_the_task_endpoint_is_closed_while_jobs_are_signed(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """With signing keys a task is refused with the reason, unless the settings trust Celery's broker."""
    keys = "k1:" + base64.b64encode(b"k" * 32).decode()
    assert Keyring.parse(keys).signs
    write_double(models_root, "signed-double")
    app = celery_of(shared_redis)
    closed = start_worker(shared_redis, models_root, environment={"PENSTOCK_SIGNING_KEYS": keys})
    refused = outcome(app, send(app, "signed-double"))
    assert "send_task is off here" in str(refused)
    closed.terminate()
    assert closed.wait(180) == 0
    trusted = {"PENSTOCK_SIGNING_KEYS": keys, "PENSTOCK_INFERENCE_CELERY_LANE": "trusted"}
    start_worker(shared_redis, models_root, environment=trusted)
    assert outcome(app, send(app, "signed-double"))["outputs"] == {"y": TWICE}


PROGRAM = """
import os
from celery import Celery

app = Celery("program", broker=os.environ["BROKER"], backend=os.environ["BROKER"])


@app.task
def first_row(answer):
    return answer["outputs"]["y"][0]


@app.task
def total(answers):
    return [sum(column) for column in zip(*[answer["outputs"]["y"][0] for answer in answers])]


@app.task
def inputs(row):
    return {"x": [row]}


@app.task
def note(task_id):
    return f"failed: {task_id}"
"""


class ProgramWorker(Process):
    """The worker of a Celery program, which consumes Celery's default queue."""

    def __init__(self, server: RedisServer, folder: Path) -> None:
        super().__init__(folder)
        self.server = server
        self.name = "program@test"

    def start(self) -> ProgramWorker:
        """Start it and wait until it answers."""
        (self.folder / "program.py").write_text(PROGRAM)
        environment = {**os.environ, "BROKER": self.server.celery_url}
        arguments = ["-A", "program", "worker", "-P", "solo", "-Q", "celery", "-n", self.name]
        self._spawn([sys.executable, "-m", "celery", *arguments], environment)
        answers(celery_of(self.server), self.name)
        return self


@pytest.fixture(scope="module")
def program_worker(fleet: Fleet, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProgramWorker]:
    """A Celery program's own worker, beside the fleet's."""
    worker = ProgramWorker(fleet.server, tmp_path_factory.mktemp("program"))
    try:
        yield worker.start()
    finally:
        worker.kill()


def infer(app: Celery, model: str = "double", **options: Any) -> Signature:
    """A signature of a job, with inputs unless a chain hands them on."""
    kwargs = {"model": model, **({} if options.pop("is_handed_on", False) else {"inputs": {"x": ROW}})}
    return app.signature("penstock.infer", kwargs=kwargs, queue="penstock", **options)


class _NoSubscriptions:
    """In the place of the backend's result consumer. The results of a canvas unsubscribe when they are freed, possibly
    after the end of their server; these never subscribe.
    """

    def __init__(self) -> None:
        self.drainer = self

    def start(self) -> None:
        """Nothing is drained."""

    def consume_from(self, task_id: str) -> None:
        """Nothing is consumed."""

    cancel_for = consume_from


def sender_of(server: RedisServer) -> Celery:
    """A Celery program that sends canvases and waits for no result. `outcome` of another one does."""
    app = celery_of(server)
    app.backend.result_consumer = _NoSubscriptions()
    return app


def started(signature: Signature, **options: Any) -> str:
    """Send a signature of `sender_of`; returns the id of its result."""
    return str(signature.apply_async(**options).id)


def test_a_chain_a_chord_and_an_errback_go_on_in_the_programs_worker(program_worker: ProgramWorker):
    """The journey of a pipeline: model, task, model, task; a chord over models; the errback of a failed job."""
    program, app = sender_of(program_worker.server), celery_of(program_worker.server)
    steps = [infer(program), program.signature("program.first_row"), program.signature("program.inputs")]
    pipeline = [*steps, infer(program, is_handed_on=True), program.signature("program.first_row")]
    assert outcome(app, started(chain(*pipeline, app=program))) == [4.0, 8.0, 12.0, 16.0]

    header = [infer(program) for _ in range(5)]
    body = started(chord(header, program.signature("program.total"), app=program))
    assert outcome(app, body) == [10.0, 20.0, 30.0, 40.0]

    errback = program.signature("program.note", task_id=str(uuid4()))
    bad = program.signature(
        "penstock.infer", kwargs={"model": "raiser", "inputs": {"x": [[-1.0, 0.0, 0.0, 0.0]]}}, queue="penstock"
    )
    failed = started(bad, link_error=errback)
    assert outcome(app, errback.options["task_id"]) == f"failed: {failed}"
    assert isinstance(outcome(app, failed), ModelError)


def test_a_monitor_sees_one_task_for_a_sent_task(fleet: Fleet):
    """From the message to the result, every event has the task's id, and the name is the model's. A refused task fails
    under its id, too; both workers' halves are one task in Flower. They come over two connections, in either order.
    """
    with celery_of(fleet.server) as app, monitoring(app) as monitor:
        answers(app, fleet.worker.name)
        sent, refused = (send(app, "double", priority=priority) for priority in ("high", "urgent"))
        monitor.task(sent, "SUCCESS")
        monitor.task(refused, "FAILURE")
        assert outcome(app, sent)["outputs"] == {"y": TWICE}
    events = [event for event in monitor.events if event["type"].startswith("task-")]
    kinds = {task: sorted(event["type"] for event in events if event["uuid"] == task) for task in (sent, refused)}
    assert kinds[sent] == ["task-received", "task-started", "task-succeeded"]
    assert kinds[refused] == ["task-failed", "task-received"]
    assert not [event for event in events if sent in event["uuid"] and event["uuid"] != sent]
    shown = monitor.state.tasks[sent]
    assert (shown.name, shown.worker.hostname, shown.kwargs) == (
        "penstock.infer.double",
        fleet.worker.name,
        "{'model': 'double'}",
    )


@pytest.mark.slow
def test_messages_wait_for_their_eta_and_can_be_revoked_until_then(fleet: Fleet):
    """`countdown` delays a job. A revoked message with an `eta` never becomes one, and an expired one neither."""
    with celery_of(fleet.server) as app, sender_of(fleet.server) as sender:
        answers(app, fleet.worker.name)
        later = started(infer(sender), countdown=1)
        revoked = started(infer(sender), countdown=2)
        expired = started(infer(sender), countdown=2, expires=1)
        app.control.revoke(revoked)
        assert outcome(app, later)["outputs"] == {"y": TWICE}
        assert isinstance(outcome(app, revoked), TaskRevokedError)
        assert isinstance(outcome(app, expired), TaskRevokedError)
        with Client(fleet.server.url) as client:
            assert client.job(f"double.{later}").status() == "completed"
            for never in (revoked, expired):
                with pytest.raises(UnknownJob):
                    client.job(f"double.{never}").status()


@pytest.mark.slow
def test_followers_survive_the_worker(redis_server: RedisServer, models_root: Path, start_worker: StartWorker):
    """After kill -9 with running and waiting jobs, every next step is sent, under the id that the program knows."""
    write_sleeper(models_root, "task-sleeper", forward_s=0.2, max_batch_size=2)
    first = start_worker(redis_server, models_root)
    with celery_of(redis_server) as app, sender_of(redis_server) as sender:
        ids = [str(uuid4()) for _ in range(12)]
        steps = [
            started(chain(infer(sender, "task-sleeper", task_id=task_id), sender.signature("after"), app=sender))
            for task_id in ids
        ]
        outcome(app, ids[0])
        # Celery's side of the worker holds this one when the worker dies.
        delayed = chain(infer(sender, "task-sleeper"), sender.signature("after"), app=sender)
        steps.append(started(delayed, countdown=5))
        with redis_server.client() as client:
            # kombu takes a message off its queue before it records that: a kill in between would lose it.
            wait_until(lambda: client.hlen(f"{CELERY_QUEUE}:unacked") == 1, 30, "the worker holds the message")
        first.kill()
        start_worker(redis_server, models_root)
        with redis_server.client() as client:

            def sent() -> set[str]:
                # A step may be there twice.
                return {json.loads(message)["headers"]["id"] for message in client.lrange("celery", 0, -1)}

            # A message that the killed worker held comes back after Celery's visibility time-out of 60 s.
            wait_until(lambda: sent() == set(steps), 240, "every next step is sent")
        assert [outcome(app, task_id)["outputs"] for task_id in ids] == [{"y": TWICE}] * 12


@pytest.mark.slow
def test_a_result_backend_of_its_own_gets_the_results(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """PENSTOCK_CELERY_RESULT_URL names the program's backend: here `rpc://`, whose results are messages."""
    write_double(models_root)
    start_worker(redis_server, models_root, environment={"PENSTOCK_CELERY_RESULT_URL": "rpc://"})
    with Celery("program", broker=redis_server.celery_url, backend="rpc://", set_as_current=False) as app:
        done = app.send_task("penstock.infer", queue="penstock", kwargs={"model": "double", "inputs": {"x": ROW}})
        refused = app.send_task("penstock.infer", queue="penstock", kwargs={"model": "missing", "inputs": {"x": ROW}})
        assert done.get(timeout=180)["outputs"] == {"y": TWICE}
        assert "Unknown model 'missing'" in str(refused.get(timeout=180, propagate=False))


class FlowerProcess(Process):
    """Flower with a password, on a free loopback port. url: of its broker, the server's own if empty."""

    def __init__(self, server: RedisServer, folder: Path, url: str = "") -> None:
        super().__init__(folder)
        self._server = server
        self._url = url or server.url
        self._access = f"someone:{uuid4().hex}"
        self._port = free_port()

    def start(self) -> FlowerProcess:
        """Start it and wait until it answers and hears events: it answers before it has subscribed to them."""
        before = self._subscribers()
        arguments = ["-A", "penstock.workers.app", "flower", "--address=127.0.0.1", f"--port={self._port}"]
        arguments += [f"--basic-auth={self._access}", "--inspect_timeout=2000"]
        # In milliseconds.
        arguments += ["--persistent=True", f"--db={self.folder / 'flower.db'}", "--state_save_interval=1000"]
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_HOME": str(self.folder / "home"),
            "PENSTOCK_REDIS_URL": self._url,
        }
        self._run("celery", arguments, environment)
        wait_until(lambda: self.get("/api/workers") is not None, 30, "Flower answers")
        wait_until(lambda: self._subscribers() > before, 60, "Flower hears events")
        return self

    def _subscribers(self) -> int:
        """The broker's connections that hear what is published."""
        with self._server.client() as client:
            return sum(int(each["sub"]) + int(each["psub"]) > 0 for each in client.client_list())

    def get(self, path: str, *, access: str | None = None) -> Any:
        """The JSON that Flower's API answers; None while it does not."""
        encoded = base64.b64encode((access or self._access).encode()).decode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{self._port}{path}", headers={"Authorization": f"Basic {encoded}"}
        )
        try:
            with urllib.request.urlopen(request, timeout=180) as answer:  # noqa: S310 - our own address
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 401:
                raise
            return None
        except (urllib.error.URLError, TimeoutError):
            return None

    def database(self) -> bytes:
        """The file in which Flower keeps what it has heard."""
        return b"".join(file.read_bytes() for file in self.folder.glob("flower.db*"))

    def stop(self) -> None:
        """Kill it."""
        if self._child is not None:
            self.kill()


@contextmanager
def flower_on(server: RedisServer, folder: Path) -> Iterator[FlowerProcess]:
    """Inside the block, Flower runs."""
    require(_flower_version(), "Flower")
    folder.mkdir()
    flower = FlowerProcess(server, folder)
    try:
        yield flower.start()
    finally:
        flower.stop()


def _flower_version() -> str | None:
    from importlib import metadata

    try:
        return metadata.version("flower")
    except metadata.PackageNotFoundError:
        return None


def test_flower_shows_every_worker_and_every_job(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker, tmp_path: Path
):
    """SH-008: 200 jobs of a run and a failure, each with its model, state and runtime; payloads nowhere; behind a
    password.
    """
    write_double(models_root)
    write_raiser(models_root)
    with flower_on(redis_server, tmp_path / "flower") as flower, Client(redis_server.url) as client:
        workers = [start_worker(redis_server, models_root) for _ in range(2)]
        rows = [{"x": np.array([[n, CANARY, 0, 0]], np.float32)} for n in range(200)]
        jobs = client.submit_many("double", rows)
        bad = client.submit("raiser", {"x": [[-1.0, 0.0, 0.0, 0.0]]})
        for job in jobs:
            job.result(timeout=180)
        with pytest.raises(ModelError):
            bad.result(timeout=180)

        def tasks() -> dict[str, Any]:
            return flower.get("/api/tasks") or {}

        wait_until(
            lambda: sum(task["state"] in ("SUCCESS", "FAILURE") for task in tasks().values()) == 201,
            20,
            "Flower shows all",
        )
        shown = tasks()
        assert {job.id for job in jobs} < set(shown)
        for job in jobs:
            task = shown[job.id]
            assert (task["name"], task["state"], task["result"]) == ("penstock.infer.double", "SUCCESS", "version 1")
            assert task["runtime"] >= 0
            assert task["received"] <= task["started"] <= task["succeeded"]
        assert shown[bad.id]["state"] == "FAILURE"
        assert shown[bad.id]["exception"] == "ModelError('ValueError: a negative row')"
        assert 'raise ValueError("a negative row")' in shown[bad.id]["traceback"]
        assert str(CANARY) not in json.dumps(shown)
        names = {worker.name for worker in workers}

        def shown_workers() -> dict[str, Any] | None:
            """None while an answer is missing: Flower asks for each fact apart, and does not wait for slow answers."""
            found = flower.get("/api/workers?refresh=1") or {}
            return found if all({"stats", "active_queues"} <= set(found.get(name, ())) for name in names) else None

        seen: Any = wait_until(shown_workers, 60, "Flower shows the workers")
        totals = [seen[name]["stats"]["total"].get("penstock.infer.double", 0) for name in names]
        assert sum(totals) == 200
        assert all([queue["name"] for queue in seen[name]["active_queues"]] == ["penstock"] for name in names)
        with pytest.raises(urllib.error.HTTPError):
            flower.get("/api/tasks", access="someone:else")


@contextmanager
def busy(
    server: RedisServer, models_root: Path, start_worker: StartWorker, forward_s: float
) -> Iterator[tuple[WorkerProcess, Client, list[Any]]]:
    """A worker whose only model runs one job for `forward_s` while three more wait."""
    write_sleeper(models_root, "slow", forward_s=forward_s, max_batch_size=1)
    worker = start_worker(server, models_root)
    consumes(celery_of(server), worker)
    with Client(server.url) as client:
        yield worker, client, client.submit_many("slow", [{"x": [[float(n), CANARY, 0.0, 0.0]]} for n in range(4)])


def test_inspect_shows_what_runs_and_what_waits(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """inspect active, reserved and stats of a real worker, over the wire."""
    with busy(redis_server, models_root, start_worker, forward_s=1.5) as (worker, _, jobs):
        inspect = celery_of(redis_server).control.inspect([worker.name], timeout=60)
        active: Any = wait_until(lambda: (inspect.active() or {}).get(worker.name), 10, "a job is active")
        reserved = (inspect.reserved() or {})[worker.name]
        shown = [task["id"] for task in (*active, *reserved)]
        assert active[0]["name"] == "penstock.infer.slow"
        assert set(shown) <= {job.id for job in jobs}
        assert len(reserved) >= 1
        assert str(CANARY) not in json.dumps([active, reserved])
        for job in jobs:
            job.result(timeout=180)
        # A result reaches the client before its worker counts the job.
        wait_until(lambda: _total_of(inspect, worker, "slow") == 4, 10, "all four jobs are counted")


def _total_of(inspect: Any, worker: WorkerProcess, model: str) -> int:
    """How many jobs of the model the worker has ended, by `inspect stats`."""
    return int((inspect.stats() or {})[worker.name]["total"].get(f"penstock.infer.{model}", 0))


def test_a_revoked_job_never_runs(redis_server: RedisServer, models_root: Path, start_worker: StartWorker):
    """`control revoke` takes the id of a job or of a task: the job ends as cancelled, Celery's task as revoked,
    and `inspect revoked` lists it.
    """
    app = celery_of(redis_server)
    with busy(redis_server, models_root, start_worker, forward_s=1.0) as (worker, client, jobs):
        inspect = app.control.inspect([worker.name], timeout=60)
        app.control.revoke("never-run")
        wait_until(lambda: "never-run" in ((inspect.revoked() or {}).get(worker.name) or ()), 10, "it is known")
        send(app, "slow", task_id="never-run-either")
        late = client.submit("slow", {"x": ROW})
        app.control.revoke([late.id, "never-run-either"])
        for job in jobs:
            job.result(timeout=180)
        revoked = outcome(app, "never-run-either")
        assert isinstance(revoked, TaskRevokedError)
        if not isinstance(late_end := _end_of(late), Cancelled):
            pytest.fail(f"the job ended as {late_end!r}")


def test_a_revoke_leaves_running_work_alone(redis_server: RedisServer, models_root: Path, start_worker: StartWorker):
    """A job that runs ends with its result; and a revoke that is meant for another program's task stores nothing."""
    app = celery_of(redis_server)
    write_sleeper(models_root, "slow", forward_s=1.5)
    worker = start_worker(redis_server, models_root)
    consumes(app, worker)
    inspect = app.control.inspect([worker.name], timeout=60)
    running, foreign = send(app, "slow"), str(uuid4())
    wait_until(lambda: (inspect.active() or {}).get(worker.name), 10, "the job runs")
    app.control.revoke([running, foreign])
    wait_until(lambda: foreign in ((inspect.revoked() or {}).get(worker.name) or ()), 10, "the revoke is known")
    assert outcome(app, running)["outputs"] == {"y": TWICE}
    assert app.AsyncResult(foreign).state == "PENDING"


def _end_of(job: Any) -> Any:
    try:
        return job.result(timeout=180)
    except Cancelled as error:
        return error


def test_commands_that_stop_or_change_a_worker_are_refused(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """Celery's commands cannot shut down, resize or re-route a worker, unless the settings allow them."""
    write_double(models_root)
    app = celery_of(redis_server)
    worker = start_worker(redis_server, models_root)
    consumes(app, worker)
    for command, arguments in (
        ("shutdown", {}),
        ("pool_grow", {"n": 1}),
        ("add_consumer", {"queue": "other"}),
        ("cancel_consumer", {"queue": "penstock"}),
        ("rate_limit", {"task_name": "penstock.infer", "rate_limit": "1/h"}),
        ("time_limit", {"task_name": "penstock.infer", "hard": 1}),
    ):
        answers = app.control.broadcast(command, arguments, destination=[worker.name], reply=True, timeout=60)
        assert "ok" not in answers[0][worker.name]
    assert app.control.ping(destination=[worker.name], timeout=60)
    assert outcome(app, send(app, "double"))["outputs"] == {"y": TWICE}

    obedient = start_worker(redis_server, models_root, environment={"PENSTOCK_INFERENCE_CELERY_REMOTE_CONTROL": "true"})
    consumes(app, obedient)
    app.control.shutdown(destination=[obedient.name])
    assert obedient.wait(180) == 0
    assert worker.is_running


def test_events_are_switched_over_the_wire(redis_server: RedisServer, models_root: Path, start_worker: StartWorker):
    """Task events are on by default. disable_events stops them, enable_events starts them again."""
    write_double(models_root)
    app = celery_of(redis_server)
    worker = start_worker(redis_server, models_root)
    consumes(app, worker)
    with redis_server.client() as listener, Client(redis_server.url) as client:
        subscription = listener.pubsub()
        subscription.psubscribe("*celeryev*")

        def hears() -> bool:
            client.submit("double", {"x": ROW}).result(timeout=180)
            heard = b""
            while message := subscription.get_message(ignore_subscribe_messages=True, timeout=0.3):
                heard += message["channel"]
            return b"task" in heard

        assert wait_until(hears, 5, "task events by default")
        app.control.disable_events(destination=[worker.name])
        wait_until(lambda: not hears(), 10, "silence")
        app.control.enable_events(destination=[worker.name])
        wait_until(hears, 10, "task events again")
        subscription.close()


def test_events_wait_for_others_as_long_as_the_setting_says(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """celery.events_interval_ms: within an hour the events of a job are on no channel; the worker's end sends them."""
    write_double(models_root)
    slow = {"PENSTOCK_INFERENCE_CELERY_EVENTS_INTERVAL_MS": "3600000"}
    worker = start_worker(redis_server, models_root, environment=slow)
    with redis_server.client() as listener, Client(redis_server.url) as client:
        subscription = listener.pubsub()
        subscription.psubscribe("*celeryev*task.*")
        client.submit("double", {"x": ROW}).result(timeout=180)

        def heard() -> bool:
            return subscription.get_message(ignore_subscribe_messages=True, timeout=0.5) is not None

        # The default is 50 ms.
        assert not any(heard() for _ in range(4))
        worker.terminate()
        wait_until(heard, 30, "the events of the job are sent at the end")
        subscription.close()


def test_the_drain_does_not_depend_on_celerys_broker(
    shared_redis: RedisServer, redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """Celery has a broker of its own. While that broker is dead, jobs run; when it is back, Celery answers again. One
    message is held for its `eta` meanwhile: kombu cannot give it back to a dead broker.
    """
    write_double(models_root, "detached-double")
    app = celery_of(redis_server)
    worker = start_worker(shared_redis, models_root, environment={"PENSTOCK_CELERY_URL": redis_server.celery_url})
    consumes(app, worker)
    _let_go(infer(app, "detached-double").apply_async(countdown=600))
    with redis_server.client() as client:
        wait_until(lambda: client.hlen(f"{CELERY_QUEUE}:unacked") == 1, 30, "the worker holds the message")
    redis_server.kill()
    with Client(shared_redis.url) as client:
        for _ in range(20):
            assert client.submit("detached-double", {"x": ROW}).result(timeout=180)["y"].tolist() == TWICE
    assert worker.is_running
    redis_server.restart()
    consumes(app, worker)
    assert outcome(app, send(app, "detached-double"))["outputs"] == {"y": TWICE}


def test_foreign_messages_do_not_end_the_worker_and_foreign_queues_are_left_alone(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """The worker drops unknown tasks, malformed messages and bytes that are not a message, and serves the next task.
    Its log shows no body of theirs. Tasks on other queues stay where they are.
    """
    write_double(models_root)
    app = celery_of(redis_server)
    worker = start_worker(redis_server, models_root)
    consumes(app, worker)
    _let_go(app.send_task("other.task", queue="other", args=[1]))
    _let_go(app.send_task("unknown.task", queue="penstock", args=[str(CANARY)]))
    good = _raw_message(redis_server, app)
    hostile: list[bytes] = [
        b"not json",
        b"[]",
        b"7",
        b"{}",
        b'{"body": "x"}',
        _changed(good, lambda message: message.update(body="!!!")),
        _changed(good, lambda message: message.update(body=base64.b64encode(b"[1]").decode())),
        _changed(good, lambda message: message.update(body=base64.b64encode(b"\x80\x04pickle").decode())),
        _changed(good, lambda message: message.update({"content-type": "application/x-python-serialize"})),
        _changed(good, lambda message: message.update(body=base64.b64encode(b"[%f" % CANARY).decode(), headers={})),
        _changed(good, lambda message: message.update(body=base64.b64encode(b"[%f]" % CANARY).decode(), headers={})),
        _changed(good, lambda message: message["headers"].update(eta="soon", kwargsrepr=str(CANARY))),
        _changed(good, lambda message: message["headers"].pop("id")),
        _changed(good, lambda message: message.update(headers=None)),
        _changed(good, lambda message: message.update(properties={})),
    ]
    for payload in hostile:
        with redis_server.client() as client:
            client.lpush("penstock", payload)
        task_id = send(app, "double")
        assert outcome(app, task_id)["outputs"] == {"y": TWICE}, payload
        assert worker.is_running
    with redis_server.client() as client:
        assert client.llen("other") == 1
        assert client.llen("penstock") == 0
    assert str(CANARY) not in worker.output.read_text()


def _raw_message(server: RedisServer, app: Celery) -> bytes:
    """The bytes of a task message in Redis, taken from a queue of their own."""
    send(app, "double", queue="specimen")
    with server.client() as client:
        return bytes(wait_until(lambda: client.rpop("specimen"), 5, "the message is there"))


def _changed(message: bytes, change: Callable[[dict[str, Any]], Any]) -> bytes:
    decoded = json.loads(message)
    change(decoded)
    return json.dumps(decoded).encode()


def test_sigterm_lets_the_running_batch_finish(redis_server: RedisServer, models_root: Path, start_worker: StartWorker):
    """A warm shutdown ends with status 0 after the running job. The next worker runs the jobs that waited."""
    with busy(redis_server, models_root, start_worker, forward_s=1.0) as (worker, _, jobs):
        inspect = celery_of(redis_server).control.inspect([worker.name], timeout=60)
        wait_until(lambda: (inspect.active() or {}).get(worker.name), 10, "a job runs")
        worker.terminate()
        assert worker.wait(180) == 0
        assert jobs[0].result(timeout=180)["y"][0][0] == 0.0
        start_worker(redis_server, models_root)
        assert [job.result(timeout=180)["y"][0][0] for job in jobs] == [0.0, 2.0, 4.0, 6.0]


def test_a_worker_whose_thread_died_ends_so_that_its_supervisor_starts_another(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """The watchdog ends the process: it would answer pings, and serve no jobs."""
    write_package(
        models_root,
        "killer",
        """
        import ctypes
        import threading

        def build():
            def forward(inputs):
                if (inputs["x"] < 0).any():
                    victim = next(thread for thread in threading.enumerate() if thread.name == "task-results")
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(victim.ident), ctypes.py_object(SystemExit)
                    )
                return {"y": inputs["x"]}

            return forward
        """,
    )
    worker = start_worker(redis_server, models_root)
    with Client(redis_server.url) as client:
        client.submit("killer", {"x": [[-1.0, 0.0, 0.0, 0.0]]}).result(timeout=180)
    assert worker.wait(180) == 70
    assert any(line["msg"] == "worker gives up" and "Celery task results" in line["reason"] for line in worker.logs())


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"PENSTOCK_INFERENCE_BATCHNG_ENABLED": "1"}, "Unknown variable PENSTOCK_INFERENCE_BATCHNG_ENABLED"),
        ({"PENSTOCK_INFERENCE_DEVICE": "cuda:7"}, "Device cuda:7 is not there"),
        ({"PENSTOCK_WORKER_MODELS": "double,missing"}, "Unknown model 'missing'"),
        ({"PENSTOCK_INFERENCE_REPO_ROOT": "nowhere"}, "Models root 'nowhere' is not a folder"),
        ({"PENSTOCK_REDIS_URL": "", "PENSTOCK_CELERY_URL": ""}, "No broker"),
    ],
)
def test_a_worker_that_cannot_work_writes_one_line(
    shared_redis: RedisServer,
    models_root: Path,
    start_worker: StartWorker,
    environment: dict[str, str],
    text: str,
):
    """The exit status is 78; the line has the reason and the expected value, and there is no traceback."""
    write_double(models_root)
    worker = start_worker(shared_redis, models_root, environment=environment, wait=False)
    assert worker.wait(180) == 78
    said = [line for line in worker.output.read_text().splitlines() if line.startswith("penstock: ")]
    assert len(said) == 1
    assert text in said[0]
    assert "Traceback" not in worker.output.read_text()


def test_a_port_in_use_a_device_in_use_and_a_pool_are_refused(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker, tmp_path: Path
):
    """Each in one line that names the variable to change."""
    write_double(models_root, "refusing-double")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        worker = start_worker(shared_redis, models_root, environment={"PENSTOCK_METRICS_PORT": port}, wait=False)
        assert worker.wait(180) == 78
        assert f"Metrics port {port} on 127.0.0.1 is in use" in worker.output.read_text()

    same = {"PENSTOCK_HOME": str(tmp_path / "home"), "PENSTOCK_WORKER_INDEX": "0"}
    start_worker(shared_redis, models_root, environment=same)
    second = start_worker(shared_redis, models_root, environment=same, wait=False)
    assert second.wait(180) == 78
    assert "Another worker is cpu0 already" in second.output.read_text()


def test_a_bare_celery_worker_needs_no_options(shared_redis: RedisServer, models_root: Path, tmp_path: Path):
    """`celery -A penstock.workers.app worker` takes pool, concurrency and name from the settings and the device."""
    write_double(models_root, "bare-double")
    folder = tmp_path / "bare"
    folder.mkdir()
    worker = _BareWorker(shared_redis, models_root, folder)
    try:
        worker.launch()
        report: Any = wait_until(lambda: worker.is_ready() and worker.report(), 30, "it is ready")
        assert report["name"] == f"cpu0@{socket.gethostname()}"
        app = celery_of(shared_redis)
        worker.name = report["name"]
        consumes(app, worker)
        stats = (app.control.inspect([worker.name], timeout=60).stats() or {})[worker.name]
        assert stats["pool"]["implementation"] == "celery.concurrency.solo:TaskPool"
        assert stats["pool"]["max-concurrency"] == 1
    finally:
        worker.stop()


class _BareWorker(WorkerProcess):
    def __init__(self, server: RedisServer, models_root: Path, folder: Path) -> None:
        super().__init__(server, models_root, folder, name="")

    def launch(self) -> None:
        """Without -P, -c and -n."""
        self._spawn([sys.executable, "-m", "celery", "-A", "penstock.workers.app", "worker"], self._environment)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["-P", "threads"], "Expected the pool `-P solo`"),
        pytest.param(["-Q", "celery"], "consumes the queue 'penstock' only", marks=pytest.mark.slow),
    ],
)
def test_the_worker_refuses_other_pools_and_queues(
    shared_redis: RedisServer, models_root: Path, tmp_path: Path, options: list[str], text: str
):
    """CUDA does not survive a fork, and the drain has threads: the worker refuses every pool but solo. Other queues
    belong to the workers of other programs.
    """
    write_double(models_root, "pool-double")
    worker = _BareWorker(shared_redis, models_root, tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "penstock.workers.app", "worker", *options],
        env=worker._environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert ended.returncode == 78
    assert text in ended.stderr
