"""Python processes that need not import what every worker or gateway imports: forks of one process that has done so.

    ForkServer.run(module, arguments) -- request --> fork --> `python -m module arguments`
    ForkedProcess.poll, wait <-- pid and exit status ------'

Imports are most of what the start of a worker costs, and the tests start hundreds. A fork is a process like any other:
it has its own environment, folder and output before its module runs.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

__all__ = ["ForkServer", "ForkedProcess"]

_ROOT: Final = Path(__file__).resolve().parent.parent
_IMPORTED: Final = (
    *("celery.apps.worker", "celery.backends.redis", "celery.bin.celery", "celery.concurrency.solo"),
    *("celery.fixups.django", "celery.worker.consumer", "kombu.transport.redis"),
    *(
        "penstock.registry.broker.redis_streams",
        "penstock.registry.stack_file",
        "penstock.workers.versions.reconciler",
        "penstock.safety.audit",
        "penstock.safety.operator_key",
    ),
    *(
        "penstock.workers.process.exit_status",
        "penstock.workers.celery_bridge.consumer",
        "penstock.workers.compilation",
        "penstock.workers.process.device",
        "penstock.workers.drain",
    ),
    *(
        "penstock.workers.process.heartbeat",
        "penstock.workers.process.crash_journal",
        "penstock.workers.worker",
        "penstock.workers.versions.repository",
        "penstock.workers.observe.probe",
    ),
    *("penstock.workers.levels.optimizer", "penstock.workers.runtime.python_entrypoint"),
    *("penstock.compose.cli", "penstock.producers.gateway.application", "penstock.producers.gateway.server", "uvloop"),
    "penstock.producers.gateway.rpc.server",
)
"""What a worker and a gateway import, as far as it reads neither environment nor settings and is no framework. One that
is missing here costs time, and nothing else."""
_MESSAGE_BYTES: Final = 1 << 18


class ForkedProcess:
    """A forked process, as subprocess.Popen shows its own."""

    def __init__(self, fork_server: ForkServer, pid: int, args: Sequence[str]) -> None:
        self._fork_server = fork_server
        self.pid = pid
        self.args: Any = args
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, negative when a signal ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._fork_server.status_of(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, when it has ended. Raises subprocess.TimeoutExpired."""
        until = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired([*self.args], timeout or 0.0)
            time.sleep(0.005)
        return status

    def send_signal(self, number: int) -> None:
        """Send a signal; a process that has ended takes none."""
        if self.poll() is None:
            os.kill(self.pid, number)


class ForkServer:
    """The process that forks, started when it is first asked; `close` ends it. Safe to use from several threads.

    further: modules that it imports beyond those of every worker, such as a framework.
    """

    def __init__(self, *further: str) -> None:
        self._further = further
        self._lock = threading.Lock()
        self._statuses: dict[int, int] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._socket, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run(
        self, module: str, arguments: Sequence[str], *, environment: Mapping[str, str], folder: Path, output: Path
    ) -> ForkedProcess:
        """`python -m module arguments` in `folder`; what it says is added to the file `output`."""
        request = {
            "module": module,
            "arguments": [*arguments],
            "environment": {**environment},
            "folder": str(folder),
            "output": str(output),
        }
        self.start()
        with self._lock:
            self._socket.sendall(json.dumps(request).encode())
            while (pid := self._receive()) is None:
                pass
        return ForkedProcess(self, pid, [module, *arguments])

    def start(self) -> None:
        """Start it now, unless it runs."""
        with self._lock:
            if self._process is None:
                self._process = self._started()

    def status_of(self, pid: int) -> int | None:
        """The exit status of a process that was started here; None while it runs."""
        with self._lock:
            while select.select([self._socket], [], [], 0)[0]:
                self._receive()
            return self._statuses.get(pid)

    def close(self) -> None:
        """End it; what it has started goes on."""
        self._socket.close()
        self._theirs.close()
        if self._process is not None:
            self._process.wait(180)

    def _started(self) -> subprocess.Popen[bytes]:
        with self._theirs as theirs:
            command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno()), *self._further]
            environment = {**os.environ, "PYTHONPATH": str(_ROOT)}
            return subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def _receive(self) -> int | None:
        """One message: the pid of what was started, or None after it was noted that something has ended."""
        if not (message := self._socket.recv(_MESSAGE_BYTES)):
            raise RuntimeError("The fork server has ended. Expected it to run as long as the tests do")
        pid, status = json.loads(message)
        if status is None:
            # The kernel gives numbers anew: this one may have belonged to a process that ended long ago.
            self._statuses.pop(pid, None)
            return int(pid)
        self._statuses[pid] = status
        return None


def _fork_on_request(requests: socket.socket) -> dict[str, Any] | None:
    """Forks for each request; returns that request in the fork, and None here when no more will come."""
    woken, waker = socket.socketpair()
    with woken, waker:
        waker.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker.fileno())
        while True:
            ready, _, _ = select.select([requests, woken], [], [])
            if woken in ready:
                woken.recv(4096)
                _tell_who_ended(requests)
            if requests not in ready:
                continue
            if not (message := requests.recv(_MESSAGE_BYTES)):
                return None
            # What is sent to the fork before it listens waits until it does.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            if (pid := os.fork()) == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                request: dict[str, Any] = json.loads(message)
                return request
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            requests.sendall(json.dumps([pid, None]).encode())


def _tell_who_ended(requests: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        requests.sendall(json.dumps([pid, os.waitstatus_to_exitcode(status)]).encode())


def _become(request: Mapping[str, Any]) -> None:
    """What an interpreter and its parent do before `python -m` runs the module."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.path[0] = request["folder"]
    sys.argv = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def main(descriptor: str, *further: str) -> None:
    """Serves the requests that come in at an inherited socket."""
    # Ctrl-C goes to the whole group, and fixtures still have to end what was started here.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
    for module in (*_IMPORTED, *further):
        importlib.import_module(module)
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=int(descriptor)) as requests:
        request = _fork_on_request(requests)
    if request is not None:
        _become(request)


if __name__ == "__main__":
    main(*sys.argv[1:])
