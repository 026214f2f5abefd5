"""Which version of a model answers: the record that every claim brings along.

    promote, roll back -> Deployment -> seal -> Broker.activate -> `<epoch> <record>` with every delivery -> a worker

The epoch grows with every decision about a model, so that of two writers the later decision stands, whoever comes
last. Workers that know the operator's public key obey no other record.
"""

from __future__ import annotations

import msgspec

from penstock.registry.errors import BadSignature, UndecodableEnvelope
from penstock.registry.signed import Signer, Verifier, open_record, seal_record

__all__ = ["Deployment"]

_MAX_BYTES = 4096


class Deployment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The decision that `version` of `model`, with this content, answers from the next claim on."""

    epoch: int
    model: str
    version: str
    content_hash: str

    def seal(self, sign: Signer | None = None) -> bytes:
        """The record, signed where there is a signer."""
        return seal_record(msgspec.json.encode(self), sign, _context(self.model))

    @classmethod
    def open(cls, active: bytes, model: str, verify: Verifier | None = None) -> Deployment:
        """What a delivery's `active` says of its model. Raises Corrupt for anything but a record of this model."""
        epoch, space, record = active.partition(b" ")
        if not space or len(active) > _MAX_BYTES:
            raise UndecodableEnvelope("the active version is not an epoch and a record")
        try:
            deployment = _decode(open_record(record, verify, _context(model)))
        except msgspec.MsgspecError as error:
            raise UndecodableEnvelope(f"the record of the active version: {error!s:.200}") from None
        if deployment.model != model or str(deployment.epoch).encode() != epoch:
            raise BadSignature("the record of the active version was made for another model or epoch")
        return deployment


_decode = msgspec.json.Decoder(Deployment).decode


def _context(model: str) -> str:
    return f"active {model}"
