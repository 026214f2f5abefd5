"""The active version of a model: the record that every claim returns.

    promote, roll back -> Deployment -> seal -> Broker.activate -> `<epoch> <record>` with every delivery -> a worker

While an experiment runs, the record has a routing, too: the arms that share the jobs that name no version. The version
of the record stays the one in production: without the experiment it answers all of them.

The epoch increases with every decision about a model, so that the later decision wins, in whatever order they arrive.
Workers that know the operators' public keys accept only records with their signatures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

import msgspec

from penstock.registry.errors import BadSignature, UndecodableEnvelope
from penstock.registry.signed import Signer, Verifier, open_record, seal_record

__all__ = ["DeployedArm", "Deployment", "ExperimentKind", "Routing"]

_MAX_BYTES = 4096

ExperimentKind: TypeAlias = Literal["rollout", "ab"]
"""`rollout`: a candidate replaces the version in production step by step. `ab`: versions are compared."""


class DeployedArm(msgspec.Struct, frozen=True):
    """A version that gets a share of the jobs. weight: 0 to 1. Only this content answers under its label."""

    version: str
    content_hash: str
    weight: float


class Routing(msgspec.Struct, frozen=True, omit_defaults=True):
    """How an experiment divides the jobs; safety/routing.py assigns them.

    experiment: its id, which is the salt of the assignment as well. arms: in an order that the experiment keeps.
    is_sticky: whether all jobs of one sticky key have one version. shares: of the first arm, 0 to 1, by endpoint, where
    it has another share of an endpoint's jobs than its weight.
    """

    experiment: str
    kind: ExperimentKind
    arms: tuple[DeployedArm, ...]
    is_sticky: bool = False
    shares: dict[str, float] = {}


class Deployment(msgspec.Struct, frozen=True, omit_defaults=True):
    """The decision that `version` of `model`, with this content, is active from the next claim on.

    routing: divides the jobs that name no version; None: all are answered by `version`. policies: by endpoint, the
    knobs that operators have set over those of every version's model.yaml; see registry/package/policy_overlay.py.
    """

    epoch: int
    model: str
    version: str
    content_hash: str
    routing: Routing | None = None
    policies: Mapping[str, Mapping[str, Any]] = {}

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
