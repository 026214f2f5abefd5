"""The policies of a model's endpoints as data and as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.table import Table

from penstock.registry.catalog.tables import PolicyRecord, RegisteredVersion
from penstock.registry.package import ModelSpec

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["described_policies", "draw_policies"]


def described_policies(version: RegisteredVersion, policy: PolicyRecord | None) -> dict[str, Any]:
    """Each endpoint of a version: the knobs that operators have `set`, and those that its model.yaml has `declared`."""
    spec = ModelSpec.from_json(json.dumps(version.spec).encode())
    changed = policy.endpoints if policy is not None else {}
    return {
        "model": version.name,
        "version": version.version,
        "epoch": policy.epoch if policy is not None else None,
        "changed_at": policy.changed_at if policy is not None else None,
        "actor": policy.actor if policy is not None else None,
        "endpoints": {
            name: {"set": dict(changed.get(name, {})), "declared": spec.policy_for(name).model_dump()}
            for name in spec.endpoints
        },
    }


def draw_policies(data: Mapping[str, Any]) -> RenderableType:
    """One line for each endpoint and knob. A star marks what operators have set."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    knobs = list(next(iter(data["endpoints"].values()))["declared"])
    for column in ("endpoint", *knobs):
        table.add_column(column)
    for name, policy in data["endpoints"].items():
        table.add_row(name, *(_shown(policy, knob) for knob in knobs))
    return table


def _shown(policy: Mapping[str, Any], knob: str) -> str:
    if knob in policy["set"]:
        return f"{policy['set'][knob]} *"
    value = policy["declared"][knob]
    return "as the setting" if value is None else str(value)
