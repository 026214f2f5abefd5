"""One instance of a model, in a process of its own: loads the package, then answers one batch or one stream at a time.

    worker -- load, run, stream --> this process --> its own runtime --> loaded, outputs, or the exception --> worker
                  chunk, progress, is_cancelled of a stream <-- each answered by the worker -->

`InstanceProcess` runs it as `python -m penstock.workers.runtime.instance FD NAME/VERSION`. It may be killed at any
moment. The kernel kills it when its worker is gone, also in the middle of a forward.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from penstock.registry import logs
from penstock.registry.errors import ModelNotReady, PenstockError, error_named
from penstock.registry.package import ModelSpec, Package
from penstock.registry.tensors import Array
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.channel import Channel, Disconnected, Message
from penstock.workers.runtime.loading import LoadOptions
from penstock.workers.runtime.open import open_copy

__all__ = ["main"]

_LIFELINE: Final = 0
"""The descriptor of a pipe whose other end only the worker holds. Nothing is written to it."""


def main() -> None:
    """Serves the worker at the other end of the socket until it closes it."""
    _end_with_the_worker(_LIFELINE)
    for number in (signal.SIGINT, signal.SIGTERM):
        # Ctrl-C and a service manager address all processes; the worker lets this one finish its batch.
        signal.signal(number, lambda *_: None)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    with contextlib.suppress(Disconnected):
        serve(channel)


def serve(channel: Channel) -> None:
    """Answers messages. Raises Disconnected when the worker is done with this instance."""
    runtime: Runtime | None = None
    while True:
        message = channel.receive()
        try:
            if message.kind == "load":
                runtime = _loaded(message.facts)
                facts = {"content_hash": runtime.content_hash, "memory_bytes": runtime.memory_bytes}
                channel.send("loaded", facts)
                continue
            if runtime is None:
                raise ModelNotReady("The instance has loaded no model")
            if message.kind == "stream":
                outputs = _streamed(runtime, message, channel)
            else:
                outputs = runtime.run(runtime.prepare([message.arrays]))
            channel.send("outputs", arrays=outputs)
        except Disconnected:
            raise
        except (Exception, SystemExit) as error:  # a model may raise anything; the worker judges it
            channel.send("error", _described(error))


def _end_with_the_worker(lifeline: int) -> None:
    # A thread that waits for the worker's end would wait in vain while a forward holds the interpreter's lock.
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    poll = select.poll()
    poll.register(lifeline, 0)
    if poll.poll(0):
        # The worker was gone before the signal was set.
        os.kill(os.getpid(), signal.SIGKILL)


def _loaded(facts: Mapping[str, Any]) -> Runtime:
    logs.configure(facts["log_level"])
    spec = ModelSpec.model_validate_json(facts["spec"])
    package = Package(spec, Path(facts["folder"]), facts["spec_sha256"])
    options = LoadOptions(facts["content_hash"], facts["precision"], facts["warmup_requests"])
    runtime = open_copy(package, options)
    runtime.load("cpu", facts["threads"])
    return runtime


def _streamed(runtime: Runtime, message: Message, channel: Channel) -> dict[str, Array]:
    """The outputs of a stream. The worker may close it after any chunk; its outputs are then none."""
    steps = runtime.stream(message.arrays, _RemoteContext(message.facts, channel))
    try:
        while True:
            channel.send("chunk", arrays=next(steps))
            if channel.receive().kind == "close":
                return {}
    except StopIteration as end:
        outputs: dict[str, Array] = end.value
        return outputs
    finally:
        steps.close()


class _RemoteContext:
    """The context of a streaming job, which the worker holds: each use of it is a question to the worker."""

    def __init__(self, facts: Mapping[str, Any], channel: Channel) -> None:
        self.job_id: str = facts["job_id"]
        self.tenant: str = facts["tenant"]
        self._channel = channel

    @property
    def is_cancelled(self) -> bool:
        """See StreamContext."""
        return bool(self._ask("is_cancelled", {})["is_cancelled"])

    def progress(self, fraction: float) -> None:
        """See StreamContext."""
        self._ask("progress", {"fraction": float(fraction)})

    def _ask(self, kind: str, facts: Mapping[str, Any]) -> dict[str, Any]:
        self._channel.send(kind, facts)
        answer = self._channel.receive()
        if answer.kind == "error":
            raise error_named(answer.facts["name"], answer.facts["text"])
        return answer.facts


def _described(error: BaseException) -> dict[str, Any]:
    return {
        "name": type(error).__name__,
        "text": str(error),
        "is_ours": isinstance(error, PenstockError),
        "is_of_memory": isinstance(error, MemoryError),
        "traceback": "".join(traceback.format_exception(error)),
    }


if __name__ == "__main__":
    main()
