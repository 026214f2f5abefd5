"""The active version of a model: the record that every claim returns.

    promote, roll back -> Deployment -> seal -> Broker.activate -> `<epoch> <record>` with every delivery -> a worker

The epoch increases with every decision about a model, so that the later decision wins, in whatever order they arrive.
Workers that know the operators' public keys accept only records with their signatures.
"""

from __future__ import annotations

import msgspec

from penstock.registry.errors import BadSignature, UndecodableEnvelope
from penstock.registry.signed import Signer, Verifier, open_record, seal_record

__all__ = ["Deployment"]

_MAX_BYTES = 4096


class Deployment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The decision that `version` of `model`, with this content, is active from the next claim on."""

    epoch: int
    model: str
    version: str
    content_hash: str

    def seal(self, sign: Signer | None = None) -> bytes:
        """The record, signed if there is a signer."""
        return seal_record(msgspec.json.encode(self), sign, _context(self.model))

    @classmethod
    def open(cls, active: bytes, model: str, verify: Verifier | None = None) -> Deployment:
        """The decision in a delivery's `active`. Raises Corrupt for anything but a record of this model."""
        epoch, space, record = active.partition(b" ")
        if not space or len(active) > _MAX_BYTES:
            raise UndecodableEnvelope("the active version is not an epoch and a record")
        try:
            deployment = _decode(open_record(record, verify, _context(model)))
        except msgspec.MsgspecError as error:
            raise UndecodableEnvelope(f"the record of the active version: {error!s:.200}") from None
        if deployment.model != model or str(deployment.epoch).encode() != epoch:
            raise BadSignature("the record of the active version is for another model or epoch")
        return deployment


_decode = msgspec.json.Decoder(Deployment).decode


def _context(model: str) -> str:
    return f"active {model}"
