"""Control commands: an operator's signed commands to workers, sent through Celery's remote control.

    operator -- Command.seal --> broadcast `penstock_models` --> CommandVerifier.open --> a worker acts and answers

A command names its workers and is valid once. A worker without the operators' public keys accepts none.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Literal, TypeAlias

import msgspec

from penstock.registry.errors import BadSignature, Forbidden, UndecodableEnvelope
from penstock.registry.signed import Signer, Verifier, open_record, seal_record

__all__ = ["CONTROL_COMMAND", "Command", "CommandVerifier", "ControlAction"]

CONTROL_COMMAND: Final = "penstock_models"
"""The name of the command in Celery's remote control."""
_CONTEXT: Final = "control command"
_GOOD_FOR_S: Final = 300.0
"""The largest difference between the clocks of operators and workers."""
_NONCES: Final = 10_000

ControlAction: TypeAlias = Literal[
    "load", "unload", "reconcile", "compile", "optimise", "measure", "trace", "clear_cache", "rpc"
]
"""`rpc` carries a request of registry/operator_rpc.py. The others act on this worker's models; `clear_cache` without a
model acts on all of them."""


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """One command. `workers`: the workers that it is for. `at`: unix seconds. `nonce`: tells equal commands apart."""

    action: ControlAction
    model: str = ""
    version: str = ""
    content_hash: str = ""
    request_id: str = ""
    """The id of an RPC request. A repeated command with the same id asks for the response to the same request."""
    body: bytes = b""
    """The RPC request, encoded."""
    workers: tuple[str, ...] = ()
    at: float = 0.0
    nonce: str = ""

    def addressed_to(self, workers: Iterable[str]) -> Command:
        """This command for these workers, dated now. Each call makes another command, with a nonce of its own."""
        return msgspec.structs.replace(self, workers=tuple(workers), at=time.time(), nonce=secrets.token_hex(8))

    def seal(self, sign: Signer) -> str:
        """The signed command as text, for JSON."""
        return seal_record(msgspec.json.encode(self), sign, _CONTEXT).decode()


class CommandVerifier:
    """Checks the commands to one worker: signed by a known operator, for this worker, recent, and not seen before."""

    def __init__(self, verify: Verifier | None, worker: str, clock: Callable[[], float] = time.time) -> None:
        self._verify = verify
        self._worker = worker
        self._clock = clock
        self._known: OrderedDict[str, None] = OrderedDict()

    def open(self, sealed: object) -> Command:
        """The command. Raises Forbidden when this worker accepts none, and Corrupt for an invalid one."""
        if self._verify is None:
            raise Forbidden("Control commands are off here. Expected PENSTOCK_OPERATOR_PUBLIC_KEYS on the worker")
        if not isinstance(sealed, str):
            raise UndecodableEnvelope(f"a control command of type {type(sealed).__name__}. Expected text")
        payload = open_record(sealed.encode("utf-8", "surrogatepass"), self._verify, _CONTEXT)
        try:
            command = _decode(payload)
        except msgspec.MsgspecError as error:
            raise UndecodableEnvelope(f"a control command: {error!s:.200}") from None
        if self._worker not in command.workers:
            raise BadSignature("the control command is for other workers")
        if abs(self._clock() - command.at) > _GOOD_FOR_S:
            raise BadSignature(
                f"the time of the control command differs from this worker's clock by more than {_GOOD_FOR_S:g} s"
            )
        if command.nonce in self._known:
            raise BadSignature("the control command was received before")
        self._known[command.nonce] = None
        if len(self._known) > _NONCES:
            self._known.popitem(last=False)
        return command


_decode = msgspec.json.Decoder(Command).decode
