"""The gateway of the embedded stack: its port, its program, and the questions whether it lives.

settings, or any free port -> gateway_program (penstock serve) -> Supervisor
                                         HttpProbe: GET /health/live, again and again -> no answers -> killed
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Final

from penstock.compose.stack.supervisor import Program

__all__ = ["HOST", "HttpProbe", "choose_port", "gateway_program", "is_answered"]

HOST: Final = "127.0.0.1"
"""The stack is open to no network, whatever the setting of `penstock serve` says."""
_ALIVE: Final = "/health/live"


def choose_port(wanted: int) -> int:
    """`wanted`; any free port where that is 0, or where another program has it."""
    for port in (wanted, 0):
        with socket.socket() as listener:
            # As the gateway binds: a port that an earlier gateway has just left is free.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((HOST, port))
            except OSError:
                continue
            chosen: int = listener.getsockname()[1]
            return chosen
    # The gateway says why it cannot listen.
    return wanted


def gateway_program(port: int, grpc_port: int | None, environ: Mapping[str, str], output: Path) -> Program:
    """`penstock serve` on these ports of the loopback. environ: has the broker and the signing keys.

    grpc_port: None for no gRPC.
    """
    grpc = ["--no-grpc"] if grpc_port is None else ["--grpc-port", str(grpc_port)]
    arguments = [sys.executable, "-m", "penstock", "serve", "--host", HOST, "--port", str(port), *grpc]
    return Program("gateway", arguments, environ, output=output, probe=HttpProbe(port))


def is_answered(port: int, timeout_s: float) -> bool:
    """Whether the server on that port of the loopback says that it lives."""
    # No urllib: it would ask the proxy that the environment names.
    with closing(HTTPConnection(HOST, port, timeout=timeout_s)) as connection:
        try:
            connection.request("GET", _ALIVE)
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False


@dataclass(slots=True)
class _Questioned:
    """One process, and how it answered."""

    pid: int
    started: float
    next_at: float
    has_answered: bool = False
    failures: int = 0
    """In a row, since the last answer."""
    question: threading.Thread | None = None


class HttpProbe:
    """A LivenessProbe that asks a server on the loopback, each time on a thread of its own.

    every_s: between two questions. timeout_s: of one. most_failures: in a row, after the first answer. start_s: until
    the first answer.
    """

    def __init__(
        self,
        port: int,
        *,
        every_s: float = 2.0,
        timeout_s: float = 10.0,
        most_failures: int = 3,
        start_s: float = 120.0,
    ) -> None:
        self._port = port
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._most_failures = most_failures
        self._start_s = start_s
        self._process = _Questioned(0, 0.0, 0.0)

    def kill_reason(self, pid: int, now: float) -> str | None:
        """See LivenessProbe.kill_reason. After a stall of this machine at most one question has failed."""
        process = self._process
        if process.pid != pid:
            process = self._process = _Questioned(pid, now, now)
        if process.failures >= self._most_failures:
            return f"no answer to {process.failures} questions of {self._timeout_s:g} s"
        if not process.has_answered and now - process.started > self._start_s:
            return f"no answer within {self._start_s:g} s of its start"
        if now >= process.next_at and (process.question is None or not process.question.is_alive()):
            process.next_at = now + self._every_s
            process.question = threading.Thread(target=self._ask, args=(process,), name="gateway probe", daemon=True)
            process.question.start()
        return None

    def silence_s(self) -> float:
        """See LivenessProbe.silence_s. A server writes no heartbeat."""
        return 0.0

    def on_exit(self) -> None:
        """See LivenessProbe.on_exit. The next process is a new one."""

    def _ask(self, process: _Questioned) -> None:
        if is_answered(self._port, self._timeout_s):
            process.has_answered, process.failures = True, 0
        elif process.has_answered:
            process.failures += 1
