"""The worker's side of one instance: its process, started, loaded, used by one model thread at a time, ended.

    InstanceProcess -- socket --> instance.py, a child process with no secrets in its environment
                    -- pipe ----> nothing is written to it: the kernel kills the child when the worker has gone

An exception of the model is raised here with the same class name and text, and with the child's frames as its cause.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from penstock.registry.errors import ConfigurationError, ModelNotReady, error_named, shown
from penstock.registry.package import Package
from penstock.registry.tensors import Array
from penstock.workers import children
from penstock.workers.runtime.base import InstanceLost, StreamContext
from penstock.workers.runtime.channel import BadMessage, Channel, Disconnected, Message
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.runtime.tracebacks import RaisedElsewhere

__all__ = ["FormRequest", "InstanceProcess", "LoadedInstance"]

_PROGRAM: Final = "penstock.workers.runtime.instance"
_SECRETS: Final = "PENSTOCK_"
_THREADS: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_END_S: Final = 5.0
"""How long a process may take to go after its connection has gone."""
_REAPED_S: Final = 0.05

_unreaped: Final[list[subprocess.Popen[bytes]]] = []
"""Killed children that have not gone yet. Each start of a child looks for them again."""
_unreaped_lock: Final = threading.Lock()


class LoadedInstance(NamedTuple):
    """See Runtime.content_hash and Runtime.memory_bytes."""

    content_hash: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class FormRequest:
    """A form that the child builds and runs in place of the model as its author built it.

    name: such as `int8`. program: the module that the child runs, which can build forms. folder: an empty one, for what
    the build needs.
    """

    name: str
    program: str
    folder: Path


class _RaisedInInstance(Exception):
    """An exception of the model's process. Its subclass has the name of the exception's class."""

    def __str__(self) -> str:
        return str(self.args[0])


class InstanceProcess:
    """One child process with one copy of a model. One thread at a time calls `load`, `run` and `stream`.

    threads: CPU threads of its forwards. device: see Runtime.load. form: None for the model as its author built it.
    """

    def __init__(
        self,
        package: Package,
        options: LoadOptions,
        threads: int,
        device: str = "cpu",
        *,
        form: FormRequest | None = None,
    ) -> None:
        self._package = package
        self._options = options
        self._threads = threads
        self._device = device
        self._form = form
        self.incident: Final = secrets.token_hex(8)
        """Names the process when crashes are counted."""
        self._is_ended = False
        self._lock = threading.Lock()
        _reap()
        ours, theirs = socket.socketpair()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", form.program if form else _PROGRAM, str(theirs.fileno()), self._reference],
                stdin=subprocess.PIPE,
                env=_environment(threads),
                pass_fds=(theirs.fileno(),),
                # Ctrl-C in a terminal reaches the worker only, which ends its instances after their batches.
                start_new_session=True,
            )
        children.own(ours.fileno())
        if self._child.stdin is not None:
            children.own(self._child.stdin.fileno())
        self._channel = Channel(ours)

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        return self._child.poll() is None

    def begin_load(self) -> None:
        """Has the child load its copy; `end_load` waits for it."""
        package, options = self._package, self._options
        facts = {
            **_facts(package),
            "steps": [_facts(step) for step in package.steps],
            "content_hash": options.content_hash,
            "precision": options.precision,
            "warmup_requests": options.warmup_requests,
            "threads": self._threads,
            "device": self._device,
            "form": {"name": self._form.name, "folder": str(self._form.folder)} if self._form else None,
            "log_level": logging.getLevelName(logging.getLogger().getEffectiveLevel()),
        }
        # The answer says why the child has gone, if it has.
        with contextlib.suppress(Disconnected):
            self._channel.send("load", facts)

    def end_load(self) -> LoadedInstance:
        """Waits for the load. Raises ConfigurationError, and ModelNotReady when `end` came first."""
        try:
            message = self._receive()
            self._expect("loaded", message)
        except InstanceLost as error:
            raise ConfigurationError(f"{self._reference}: {error}") from None
        return LoadedInstance(str(message.facts["content_hash"]), int(message.facts["memory_bytes"]))

    def run(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """One forward; see Runtime.run. Raises InstanceLost when the process ended in it."""
        self._send("run", arrays=inputs)
        return self._outputs_of(self._receive())

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        """One stream; see Runtime.stream. Raises InstanceLost when the process ended in it."""
        self._send("stream", {"job_id": context.job_id, "tenant": context.tenant}, inputs)
        awaits_us = False
        is_over = False
        try:
            while True:
                message = self._receive()
                awaits_us = message.kind == "chunk"
                if awaits_us:
                    yield message.arrays
                    self._send("go on")
                elif message.kind in ("is_cancelled", "progress"):
                    self._answer(message, context)
                else:
                    is_over = True
                    return self._outputs_of(message)
        except InstanceLost:
            is_over = True
            raise
        finally:
            if not is_over:
                self._close_stream(context, awaits_us=awaits_us)

    def end(self) -> None:
        """Kills the process. A call that waits for it raises ModelNotReady. For any thread, more than once."""
        with self._lock:
            if self._is_ended:
                return
            self._is_ended = True
        self._kill()
        with contextlib.suppress(OSError):
            self._channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_REAPED_S)
        if self._child.returncode is None:
            with _unreaped_lock:
                _unreaped.append(self._child)

    @property
    def _reference(self) -> str:
        return self._package.spec.reference

    def _answer(self, message: Message, context: StreamContext) -> None:
        """Answers a question of the entry point about its job."""
        kind, facts = "answer", dict[str, object]()
        try:
            if message.kind == "progress":
                context.progress(message.facts["fraction"])
            facts["is_cancelled"] = context.is_cancelled
        except Exception as error:
            # It is raised in the entry point, as it would be in this process.
            kind, facts = "error", {"name": type(error).__name__, "text": str(error)}
        self._send(kind, facts)

    def _close_stream(self, context: StreamContext, *, awaits_us: bool) -> None:
        """Has the entry point clean up behind its last chunk, and takes in its last messages."""
        if awaits_us:
            self._send("close")
        while (message := self._receive()).kind in ("chunk", "is_cancelled", "progress"):
            if message.kind == "chunk":
                self._send("close")
            else:
                self._answer(message, context)
        if message.kind != "error":
            self._expect("outputs", message)

    def _outputs_of(self, message: Message) -> dict[str, Array]:
        self._expect("outputs", message)
        return message.arrays

    def _expect(self, kind: str, message: Message) -> None:
        """Raises the exception that the message holds, and InstanceLost for a message of another kind."""
        if message.kind == "error":
            raise self._exception(message.facts)
        if message.kind != kind:
            # Its further messages could be the answers of another job.
            raise self._lost(f"found the message {shown(message.kind)}, expected {kind}")

    def _send(
        self, kind: str, facts: Mapping[str, Any] | None = None, arrays: Mapping[str, Array] | None = None
    ) -> None:
        try:
            self._channel.send(kind, facts, arrays)
        except Disconnected:
            raise self._lost() from None

    def _receive(self) -> Message:
        try:
            return self._channel.receive()
        except (Disconnected, BadMessage) as error:
            raise self._lost(str(error) if isinstance(error, BadMessage) else "") from None

    def _lost(self, reason: str = "") -> Exception:
        """The error of a process that ended, or sent what is no message."""
        if self._is_ended:
            return ModelNotReady(f"{self._reference} was unloaded")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_S if not reason else 0)
        status = self._child.returncode
        if status is None:
            how = f"was killed: {reason or 'it closed its connection'}"
        else:
            how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        self.end()
        return InstanceLost(f"an instance {how}", self.incident)

    def _kill(self) -> None:
        """Kills the child and the processes that it started. After a wait, its pid may belong to another process."""
        if self._child.stdin is not None:
            # A model of this worker may have closed the descriptor, here and in `end`.
            with contextlib.suppress(OSError):
                self._child.stdin.close()
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child.pid, signal.SIGKILL)

    def _exception(self, facts: Mapping[str, Any]) -> BaseException:
        name, text = str(facts["name"]), str(facts["text"])
        error: BaseException
        if facts["is_ours"]:
            error = error_named(name, text)
        else:
            bases = (_RaisedInInstance, MemoryError) if facts["is_of_memory"] else (_RaisedInInstance,)
            error = type(name, bases, {"__module__": "builtins"})(text)
        error.__cause__ = RaisedElsewhere(str(facts["where"]), str(facts["frames"]))
        return error


def _facts(package: Package) -> dict[str, str]:
    """A package without its steps, for the child."""
    return {
        "spec": package.spec.model_dump_json(),
        "folder": str(package.folder.absolute()),
        "spec_sha256": package.spec_sha256,
    }


def _environment(threads: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
    return {
        **inherited,
        **dict.fromkeys(_THREADS, str(threads)),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }


def _reap() -> None:
    with _unreaped_lock:
        _unreaped[:] = [child for child in _unreaped if child.poll() is None]
