"""A worker process opened, closed and commanded inside the test's own process."""

from __future__ import annotations

import ast
import math
import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.worker.control import Panel

from penstock.registry.control import CONTROL_COMMAND, Command
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from penstock.workers import worker as worker_module
from penstock.workers.celery_bridge.events import CeleryEventSender
from penstock.workers.celery_bridge.remote_control import restored_tables
from penstock.workers.celery_bridge.result_store import CeleryResultStore
from penstock.workers.celery_bridge.task_ingress import InferTask
from penstock.workers.process.crash_journal import journal_path
from penstock.workers.process.device import Pin
from penstock.workers.process.exit_status import EXIT_UNHEALTHY
from penstock.workers.worker import CeleryParts, Worker
from tests.architecture.threads import started_threads
from tests.packages import write_double
from tests.servers import ROOT, RedisServer, free_port
from tests.workers.doubles import job_of, ready_version, run_of

HOST = "cpu0@in-process"
DEVICE = Pin("cpu", 0, -1)


def celery_parts(server: RedisServer) -> CeleryParts:
    """What app.py hands to a worker, for an application of the test's own."""
    app = Celery("test", broker=server.celery_url, backend=server.celery_url, set_as_current=False)
    listener = CeleryEventSender(app, HOST, interval_s=1, is_wanted=lambda: False)
    return CeleryParts(HOST, listener, CeleryResultStore(app), InferTask())


@pytest.fixture(autouse=True)
def _celery_as_found() -> Iterator[None]:
    with restored_tables():
        yield


@pytest.fixture
def settings(shared_redis: RedisServer, models_root: Path, tmp_path: Path) -> Callable[..., Settings]:
    """Settings of a worker with the model `in-process`, and what a test adds to its environment."""
    write_double(models_root, "in-process")

    def load(**environment: str) -> Settings:
        variables = {
            "PENSTOCK_HOME": str(tmp_path / "home"),
            "PENSTOCK_REDIS_URL": shared_redis.url,
            "PENSTOCK_CELERY_URL": shared_redis.celery_url,
            "PENSTOCK_INFERENCE_REPO_ROOT": str(models_root),
            "PENSTOCK_METRICS_PORT": "0",
            **environment,
        }
        return Settings.load(environ=variables, cwd=tmp_path)

    return load


def traces(celery: CeleryParts, home: Path) -> dict[str, Any]:
    """What an open worker leaves in its process: Celery's commands, the task's endpoint, the journal, the probe."""
    return {
        "commands": dict(Panel.data),
        "ingress": celery.task.ingress,
        "journals": sorted(path.name for path in home.glob("running/*")),
        "probes": [thread for thread in threading.enumerate() if thread.name == "probe"],
    }


def test_a_closed_worker_leaves_the_process_as_it_found_it(
    shared_redis: RedisServer, settings: Callable[..., Settings], tmp_path: Path
):
    """Open takes the metrics port, the journal, the task endpoint and remote control; close gives all of them back."""
    celery, home = celery_parts(shared_redis), tmp_path / "home"
    before = traces(celery, home)
    worker = Worker.open(settings(), DEVICE, celery)
    during = traces(celery, home)
    worker.close()
    assert all(during[part] != before[part] for part in before)
    assert traces(celery, home) == before


def test_after_a_failed_open_the_next_one_works(
    shared_redis: RedisServer, settings: Callable[..., Settings], tmp_path: Path
):
    """The metrics port is in use: open says so, closes what it opened before, and works once the port is free."""
    celery, home = celery_parts(shared_redis), tmp_path / "home"
    before = traces(celery, home)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"Metrics port {port}"):
            Worker.open(settings(PENSTOCK_METRICS_PORT=str(port)), DEVICE, celery)
        assert traces(celery, home) == before
    Worker.open(settings(PENSTOCK_METRICS_PORT=str(port)), DEVICE, celery).close()
    assert traces(celery, home) == before


class ClosedTask(InferTask):
    """A task that takes no endpoint: the last part of `open` but one fails over it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "ingress" and value is not None:
            raise ConfigurationError("This task takes no endpoint. Expected another one")
        super().__setattr__(name, value)


def test_a_late_failure_of_open_gives_back_the_port_and_the_journal(
    shared_redis: RedisServer, settings: Callable[..., Settings], tmp_path: Path
):
    """The drain is built and the probe listens when the task endpoint fails: afterwards neither is in the way."""
    celery, home, port = celery_parts(shared_redis), tmp_path / "home", str(free_port())
    before = traces(celery, home)
    with pytest.raises(ConfigurationError, match="takes no endpoint"):
        Worker.open(settings(PENSTOCK_METRICS_PORT=port), DEVICE, replace(celery, task=ClosedTask()))
    assert traces(celery, home) == before
    worker = Worker.open(settings(PENSTOCK_METRICS_PORT=port), DEVICE, celery)
    assert journal_path(home, os.getpid()).exists()
    worker.close()


def test_a_home_that_cannot_be_written_is_a_mistake_of_the_settings(
    shared_redis: RedisServer, settings: Callable[..., Settings], tmp_path: Path
):
    """The journal of running jobs needs a folder: without one the worker refuses, and leaves nothing open."""
    (tmp_path / "file").write_text("in the way")
    celery = celery_parts(shared_redis)
    before = traces(celery, tmp_path / "home")
    environment = {
        "PENSTOCK_HOME": str(tmp_path / "file"),
        "PENSTOCK_INFERENCE_ENABLED": "false",
        "PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_ENABLED": "false",
    }
    with pytest.raises(ConfigurationError, match="journal of running jobs cannot be written"):
        Worker.open(settings(**environment), DEVICE, celery)
    assert traces(celery, tmp_path / "home") == before


@pytest.mark.parametrize(
    ("command", "environment", "reply"),
    [
        (Command("load", "in-process", "2"), {}, {"ok": "loading in-process/2"}),
        (Command("unload", "in-process", "2"), {}, {"ok": "unloading in-process/2"}),
        (Command("reconcile"), {}, {"ok": "reconciling"}),
        (
            Command("load", "another", "1"),
            {},
            {"error": "another is not served here. Expected one of this worker's models"},
        ),
        (
            Command("load", "in-process", "../2"),
            {},
            {
                "error": "Bad version name '../2'. Expected 1 to 64 characters of a-z, 0-9, '.', '_' or '-', starting "
                "with a letter or digit"
            },
        ),
        (
            Command("reconcile"),
            {"PENSTOCK_INFERENCE_STATE_RECONCILE_ENABLED": "false"},
            {"error": "This worker follows no shared state. Expected the command load or unload"},
        ),
        (
            Command("compile", "in-process"),
            {"PENSTOCK_INFERENCE_ENABLED": "false"},
            {"error": "Optimization is off on this worker. Expected inference.enabled on the worker"},
        ),
    ],
)
def test_a_signed_command_is_begun_or_refused_with_the_reason(
    shared_redis: RedisServer,
    settings: Callable[..., Settings],
    tmp_path: Path,
    command: Command,
    environment: dict[str, str],
    reply: dict[str, str],
):
    """Celery's remote control gets one line: what the worker begins to do, or what it cannot do and why."""
    key = OperatorKey.generate(tmp_path / "operator.pem")
    limits = {"PENSTOCK_WORKER_MODELS": "in-process", "PENSTOCK_OPERATOR_PUBLIC_KEYS": key.public_text}
    worker = Worker.open(settings(**limits, **environment), DEVICE, celery_parts(shared_redis))
    try:
        sealed = command.addressed_to([HOST]).seal(key.sign)
        assert Panel.data[CONTROL_COMMAND](None, command=sealed) == reply
    finally:
        worker.close()


class Ended(BaseException):
    """The process would have ended here."""


class Turns:
    """The clock of the watchdog: it stands still but for the sleep at the end of each turn."""

    def __init__(self, *, hang: Callable[[], None], at: int, stall_s: float = 0.0) -> None:
        self.taken = 0
        self._now = 1000.0
        self._hang, self._at, self._stall_s = hang, at, stall_s

    def monotonic(self) -> float:
        return self._now

    def sleep(self, seconds: float) -> None:
        self._now += seconds
        self.taken += 1
        if self.taken == self._at:
            self._now += self._stall_s
            self._hang()
        assert self.taken < 1000, "the process does not end"


@pytest.fixture
def worker(shared_redis: RedisServer, settings: Callable[..., Settings]) -> Iterator[Worker]:
    """A worker that has not begun."""
    worker = Worker.open(settings(), DEVICE, celery_parts(shared_redis))
    yield worker
    worker.close()


def hang_here(worker: Worker) -> None:
    """The I/O thread of the worker is in a forward that is over its limit."""
    executor = worker._drain.parts.executor
    executor.keep(run_of(ready_version(), job_of()))
    executor.here = run = executor.begin("the I/O thread")
    assert run is not None
    run.alive_at = -math.inf
    worker._drain.health.is_serving = True


@pytest.mark.parametrize(("stall_s", "most"), [(0.0, 0), (5.0, 11)], ids=["at once", "after a stall"])
def test_the_watchdog_ends_the_process_of_a_forward_that_hangs_on_the_io_thread(
    stall_s: float, most: int, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    """In its next turn, before the supervisor kills the process. After a stall it first leaves the others a second."""

    def end(status: int) -> None:
        raise Ended(status)

    turns = Turns(hang=lambda: hang_here(worker), at=3, stall_s=stall_s)
    monkeypatch.setattr(worker_module, "time", turns)
    monkeypatch.setattr("os._exit", end)
    with pytest.raises(Ended, match=f"^{EXIT_UNHEALTHY}$"):
        worker._watch()
    assert most - 2 <= turns.taken - 3 <= most


@pytest.mark.parametrize("state", ["watched", "unwatched", "stopping", "healthy"])
def test_the_supervisor_hears_of_a_forward_on_the_io_thread_from_no_worker_that_ends_itself(
    state: str, worker: Worker, monkeypatch: pytest.MonkeyPatch
):
    """It kills at once, and the watchdog has jobs to give back. Without one it is told, as of anything else."""
    is_over = threading.Event()
    watchdog = threading.Thread(target=is_over.wait, daemon=True)
    monkeypatch.setattr(worker, "_watchdog", watchdog)
    watchdog.start()
    if state != "healthy":
        hang_here(worker)
    if state == "unwatched":
        is_over.set()
        watchdog.join()
    elif state == "stopping":
        worker.ask_to_stop(is_cold=True)
    told = {
        "watched": None,
        "unwatched": "a forward of double took longer than its limit of 30 s",
        "stopping": "a forward of double took longer than its limit of 30 s",
        "healthy": "the thread of Celery task results has ended",
    }
    assert worker._told_reason() == told[state]
    is_over.set()
    watchdog.join()


def test_app_knows_of_a_job_through_the_worker_only():
    """app.py is Celery's side: of our packages it imports settings, the bridge, the process, and worker.py."""
    tree = ast.parse((ROOT / "workers" / "app.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}
    ours = {name for name in imported if name.startswith("penstock.workers.")}
    assert {name.split(".")[2] for name in ours} == {"celery_bridge", "process", "worker"}


def test_the_table_of_threads_names_every_thread_and_its_module():
    """Each thread and pool that the code starts has a row in worker.py's table, beside the module that starts it."""
    text = worker_module.__doc__ or ""
    rows = re.findall(r"^    (\S+) +(\S+\.py) ", text, re.MULTILINE)
    assert set(rows) == started_threads()
    assert len(rows) == 26
    assert "Twenty-six kinds of threads run" in text
