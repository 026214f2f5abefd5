"""The active version of a model, as the broker hands it to workers."""

from __future__ import annotations

from penstock.registry.broker.base import FleetEnd
from penstock.registry.deployment import Deployment

__all__ = ["active_deployment"]


def active_deployment(fleet: FleetEnd, name: str) -> Deployment | None:
    """The active-version record of a model; None before its first promotion.

    Raises Corrupt for a record that cannot be decoded. The signature is not checked here: workers check it.
    """
    active = fleet.actives([name])[name]
    return Deployment.open(active, name) if active else None
