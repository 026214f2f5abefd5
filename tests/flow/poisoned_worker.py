"""A worker whose Llama misbehaves for some tokens: `python -m tests.flow.poisoned_worker MOST NAME`.

A forward of more than MOST tokens does not fit into the memory. The name server never answers for SILENT. The other
faults are those of POISON.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["POISON", "SILENT", "PoisonedWorker"]

from tests.servers import WorkerProcess

POISON: Final = {"nan": "\x01", "raises": "\x02", "hangs": "\x03"}
"""Kind of fault -> the character in a prompt. The first is a matter of the weights."""
SILENT: Final = "silent.invalid"
"""A host."""
_LETTERS: Final = {"\x02": "Ă", "\x03": "ă"}
"""As tokenizers of bytes write them."""


class PoisonedWorker(WorkerProcess):
    """most: see above."""

    def __init__(self, *args: Any, most: int = 1 << 30, environment: Mapping[str, str] | None = None, **more: Any):
        super().__init__(*args, environment=environment, **more)
        self._most = most

    def launch(self) -> None:
        """Start it without waiting."""
        self._run("tests.flow.poisoned_worker", [str(self._most), self.name], self._environment)


def main(most: str, name: str) -> None:
    """Runs the worker."""
    import torch
    from transformers import LlamaForCausalLM

    from penstock.workers import app as worker_app
    from tests.workers.generation.engines import byte_tokenizer

    tokens = byte_tokenizer().get_vocab()
    raising, hanging = (tokens[_LETTERS[POISON[kind]]] for kind in ("raises", "hangs"))
    forward = LlamaForCausalLM.forward

    def poisoned(self: Any, input_ids: Any, **more: Any) -> Any:
        if input_ids.numel() > int(most):
            raise torch.OutOfMemoryError("CUDA out of memory")
        if bool((input_ids == raising).any()):
            raise ValueError("a token that is not right")
        if bool((input_ids == hanging).any()):
            threading.Event().wait()
        return forward(self, input_ids=input_ids, **more)

    resolve = socket.getaddrinfo

    def silent(host: Any, *more: Any, **named: Any) -> Any:
        if host == SILENT:
            threading.Event().wait()
        return resolve(host, *more, **named)

    socket.getaddrinfo = silent
    setattr(LlamaForCausalLM, "forward", poisoned)  # noqa: B010 - for mypy, a method is no attribute
    worker_app.app.worker_main(["worker", "-P", "solo", "-c", "1", "-n", name])


if __name__ == "__main__":
    main(*sys.argv[1:])
