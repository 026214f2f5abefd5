"""Control commands: what an operator tells workers through Celery's remote control, signed and good for once.

    operator -- Command.seal --> broadcast `penstock_models` --> CommandVerifier.open --> a worker acts and answers

A command names the workers that it is for, and must be signed: without the operators' public keys a worker takes none.
"""

from __future__ import annotations

import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Literal

import msgspec

from penstock.registry.errors import BadSignature, Forbidden, UndecodableEnvelope
from penstock.registry.signed import Signer, Verifier, open_record, seal_record

__all__ = ["CONTROL_COMMAND", "Command", "CommandVerifier"]

CONTROL_COMMAND: Final = "penstock_models"
"""What Celery's remote control calls it."""
_CONTEXT: Final = "control command"
_GOOD_FOR_S: Final = 300.0
"""Clocks of operators and workers may differ by so much."""
_NONCES: Final = 10_000

Action = Literal["load", "unload", "reconcile", "compile", "optimise", "measure", "trace", "errand"]
"""`errand`: a request of registry/operator_rpc.py; the others are about this worker's models."""


class Command(msgspec.Struct, frozen=True, omit_defaults=True):
    """One order. `at`: unix seconds; `nonce`: makes two equal orders two; `workers`: whom it was given to."""

    action: Action
    model: str = ""
    version: str = ""
    content_hash: str = ""
    errand: str = ""
    """What makes an errand that is asked for again the same one."""
    body: bytes = b""
    """The errand, encoded."""
    workers: tuple[str, ...] = ()
    at: float = 0.0
    nonce: str = ""

    def given(self, workers: Iterable[str]) -> Command:
        """This order, given now and to these workers. Each time it is another one."""
        return msgspec.structs.replace(self, workers=tuple(workers), at=time.time(), nonce=secrets.token_hex(8))

    def seal(self, sign: Signer) -> str:
        """The signed order as text, which JSON carries."""
        return seal_record(msgspec.json.encode(self), sign, _CONTEXT).decode()


class CommandVerifier:
    """Opens the orders given to one worker: each once, and only those of operators whose key is known."""

    def __init__(self, verify: Verifier | None, worker: str, clock: Callable[[], float] = time.time) -> None:
        self._verify = verify
        self._worker = worker
        self._clock = clock
        self._known: OrderedDict[str, None] = OrderedDict()

    def open(self, sealed: object) -> Command:
        """The order. Raises Forbidden when this worker takes none, and Corrupt for all that is not a fresh order."""
        if self._verify is None:
            raise Forbidden("Control commands are off here. Expected PENSTOCK_OPERATOR_PUBLIC_KEYS on the worker")
        if not isinstance(sealed, str):
            raise UndecodableEnvelope(f"a control command is text, found {type(sealed).__name__}")
        payload = open_record(sealed.encode("utf-8", "surrogatepass"), self._verify, _CONTEXT)
        try:
            command = _decode(payload)
        except msgspec.MsgspecError as error:
            raise UndecodableEnvelope(f"a control command: {error!s:.200}") from None
        if self._worker not in command.workers:
            raise BadSignature("the control command was given to other workers")
        if abs(self._clock() - command.at) > _GOOD_FOR_S:
            raise BadSignature(f"the control command is older, or newer, than {_GOOD_FOR_S:g} s")
        if command.nonce in self._known:
            raise BadSignature("the control command was given before")
        self._known[command.nonce] = None
        if len(self._known) > _NONCES:
            self._known.popitem(last=False)
        return command


_decode = msgspec.json.Decoder(Command).decode
