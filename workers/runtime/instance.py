"""One instance of a model, in a process of its own: loads the package, then answers one batch or one stream at a time.

    worker -- load, run, stream --> this process --> its own runtime --> loaded, outputs, or the exception --> worker
                  chunk, progress, is_cancelled of a stream <-- each answered by the worker -->

`InstanceProcess` runs it as `python -m penstock.workers.runtime.instance FD NAME/VERSION`. It may be killed at any
moment. The kernel kills it when its worker is gone, also in the middle of a forward.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeAlias

from penstock.registry import logs
from penstock.registry.errors import ModelNotReady, PenstockError, error_named
from penstock.registry.package import ModelSpec, Package
from penstock.registry.tensors import Array
from penstock.workers import children
from penstock.workers.runtime.base import Prepared, Runtime
from penstock.workers.runtime.channel import Channel, Disconnected, Message
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.runtime.open import open_copy
from penstock.workers.runtime.tracebacks import frames_of, message_of, name_of

__all__ = ["ForwardOf", "as_built", "main"]

ForwardOf: TypeAlias = Callable[[Runtime, Mapping[str, Any]], Callable[[Prepared], dict[str, Array]]]
"""The forward that answers batches: of a loaded runtime, as the facts of the load say."""

_LIFELINE: Final = 0
"""The descriptor of a pipe whose other end only the worker holds. Nothing is written to it."""
_TEXT_CHARACTERS: Final = 4_000
"""Of the message of an exception. The worker shortens that of a forward; that of a load may name several files."""


def as_built(runtime: Runtime, _facts: Mapping[str, Any]) -> Callable[[Prepared], dict[str, Array]]:
    """The model as its author built it."""
    return runtime.run


def main(forward_of: ForwardOf = as_built) -> None:
    """Serves the worker at the other end of the socket until it closes it."""
    children.end_with(_LIFELINE)
    children.protect_forks(_LIFELINE)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C and a service manager address all processes; the worker lets this one finish its batch.
        signal.signal(number, lambda *_: None)
    children.own(int(sys.argv[1]))
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(Disconnected):
        serve(channel, forward_of)


def serve(channel: Channel, forward_of: ForwardOf = as_built) -> None:
    """Answers messages. Raises Disconnected when the worker is done with this instance."""
    runtime: Runtime | None = None
    forward: Callable[[Prepared], dict[str, Array]] | None = None
    while True:
        message = channel.receive()
        try:
            if message.kind == "load":
                with children.ForksEnd():
                    runtime = _loaded(message.facts)
                    forward = forward_of(runtime, message.facts)
                facts = {"content_hash": runtime.content_hash, "memory_bytes": runtime.memory_bytes}
                channel.send("loaded", facts)
                continue
            if runtime is None or forward is None:
                raise ModelNotReady("The instance has loaded no model")
            with children.ForksEnd():
                if message.kind == "stream":
                    outputs = _streamed(runtime, message, channel)
                else:
                    outputs = forward(runtime.prepare([message.arrays]))
            channel.send("outputs", arrays=outputs)
        except Disconnected:
            raise
        except BaseException as error:  # a model may raise anything; the worker judges it
            channel.send("error", _described(error))


def _loaded(facts: Mapping[str, Any]) -> Runtime:
    logs.configure(facts["log_level"])
    whole = _package(facts)
    steps = tuple(replace(_package(step), pipeline=whole.folder) for step in facts["steps"])
    package = replace(whole, steps=steps)
    options = LoadOptions(facts["content_hash"], facts["precision"], facts["warmup_requests"])
    runtime = open_copy(package, options)
    runtime.load(facts["device"], facts["threads"])
    return runtime


def _package(facts: Mapping[str, Any]) -> Package:
    spec = ModelSpec.model_validate_json(facts["spec"])
    return Package(spec, Path(facts["folder"]), facts["spec_sha256"])


def _streamed(runtime: Runtime, message: Message, channel: Channel) -> dict[str, Array]:
    """The outputs of a stream. The worker may close it after any chunk; its outputs are then none."""
    context = _RemoteContext(message.facts, channel)
    steps = runtime.stream(message.arrays, context)
    try:
        while context.goes_on(next(steps)):
            pass
        return {}
    except StopIteration as end:
        outputs: dict[str, Array] = end.value
        return outputs
    finally:
        try:
            steps.close()
        finally:
            context.end()


class _RemoteContext:
    """The context of a streaming job, which the worker holds: each use of it is a question to the worker.

    For any thread of the entry point, also after the end of the stream: progress is then ignored.
    """

    def __init__(self, facts: Mapping[str, Any], channel: Channel) -> None:
        self.job_id: str = facts["job_id"]
        self.tenant: str = facts["tenant"]
        self._channel = channel
        # A thread that came between a question and its answer would take the answer of another thread.
        self._lock = threading.Lock()
        self._is_over = False
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """See StreamContext. After the end of the stream, it is the last answer of the worker."""
        self._ask("is_cancelled", {})
        return self._is_cancelled

    def progress(self, fraction: float) -> None:
        """See StreamContext."""
        self._ask("progress", {"fraction": float(fraction)})

    def goes_on(self, chunk: Mapping[str, Array]) -> bool:
        """Sends a chunk. Returns whether the worker wants another one."""
        with self._lock:
            self._channel.send("chunk", arrays=chunk)
            return self._channel.receive().kind != "close"

    def end(self) -> None:
        """The channel belongs to the next job from now on."""
        with self._lock:
            self._is_over = True

    def _ask(self, kind: str, facts: Mapping[str, Any]) -> None:
        with self._lock:
            if self._is_over:
                return
            self._channel.send(kind, facts)
            answer = self._channel.receive()
            if answer.kind == "error":
                raise error_named(answer.facts["name"], answer.facts["text"])
            self._is_cancelled = bool(answer.facts["is_cancelled"])


def _described(error: BaseException) -> dict[str, Any]:
    where, frames = frames_of(error)
    return {
        "name": name_of(error),
        "text": message_of(error, _TEXT_CHARACTERS),
        "is_ours": issubclass(type(error), PenstockError),
        "is_of_memory": issubclass(type(error), MemoryError),
        "where": where,
        "frames": frames,
    }


if __name__ == "__main__":
    main()
