"""The versions of models: read from registry, broker and workers, and drawn as tables.

registry, broker (active records, worker reports) --> rows --> JSON or tables
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.compose.rollout.active_version import active_deployment
from penstock.compose.views.overview import kinds, workers
from penstock.registry.broker.base import FleetEnd
from penstock.registry.catalog.tables import RegisteredVersion, Transition
from penstock.registry.errors import Corrupt
from penstock.registry.package import ModelSpec

__all__ = [
    "as_data",
    "draw_history",
    "draw_version",
    "draw_versions",
    "listing",
]

_SHORT_HASH = 12


def listing(registered: Iterable[RegisteredVersion], broker: FleetEnd | None) -> list[dict[str, Any]]:
    """Every version that is registered, or that a worker serves unregistered: its stage and its workers.

    `is_active`: jobs that name no version run on it; `workers`: those that have it in memory. A version in production
    that is not active waits for its activation. Raises BrokerUnavailable.
    """
    rows = {(version.name, version.version): _row(version) for version in registered}
    if broker is not None:
        reports = workers(broker)
        for name in broker.models():
            _add_unregistered(rows, broker, name, reports)
        for name in {name for name, _ in rows}:
            _add_live(rows, broker, name, reports)
    return [rows[key] for key in sorted(rows)]


def _row(version: RegisteredVersion) -> dict[str, Any]:
    spec = ModelSpec.from_json(json.dumps(version.spec).encode())
    return {
        "name": version.name,
        "version": version.version,
        "stage": str(version.stage),
        "content_hash": version.content_hash,
        "is_active": False,
        "workers": [],
        **kinds(spec),
    }


def _add_unregistered(
    rows: dict[tuple[str, str], dict[str, Any]], broker: FleetEnd, name: str, reports: Sequence[Mapping[str, Any]]
) -> None:
    """Adds versions that are missing in the registry: that of the model's spec, and those loaded in workers."""
    labels = {label for report in reports for label in report.get("versions", {}).get(name, {})}
    for label in ("", *sorted(labels)):
        found = broker.spec(name, label)
        if found is not None:
            spec = ModelSpec.from_json(found)
            row = {"name": name, "version": spec.version, "stage": None, "content_hash": "", "is_active": False}
            rows.setdefault((name, spec.version), {**row, "workers": [], **kinds(spec)})


def _add_live(
    rows: dict[tuple[str, str], dict[str, Any]], broker: FleetEnd, name: str, reports: Sequence[Mapping[str, Any]]
) -> None:
    active = _active_labels(broker, name, reports)
    for (model, label), row in rows.items():
        if model != name:
            continue
        row["is_active"] = label in active
        for report in reports:
            entry = report.get("versions", {}).get(name, {}).get(label, {})
            if entry.get("state") == "ready":
                row["workers"].append(report["name"])
                row["content_hash"] = row["content_hash"] or entry["content_hash"]


def _active_labels(broker: FleetEnd, name: str, reports: Iterable[Mapping[str, Any]]) -> set[str]:
    """The promoted version; before the first promotion, those that the workers chose themselves."""
    try:
        decision = active_deployment(broker, name)
    except Corrupt:
        # Workers ignore such a record, and `penstock doctor` reports it.
        decision = None
    if decision is not None:
        return {decision.version}
    return {report["models"][name] for report in reports if name in report["models"]}


def as_data(version: RegisteredVersion) -> dict[str, Any]:
    """The registry's record of a version, ready for JSON."""
    return {**asdict(version), "stage": str(version.stage), "lineage": version.lineage.model_dump()}


def draw_versions(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One line per version, with its inputs and outputs."""
    table = _table("model", "version", "stage", "content hash", "active", "loaded by", "inputs", "outputs")
    for row in rows:
        stage = row["stage"] or "not registered"
        active = "yes" if row["is_active"] else "not yet" if row["stage"] == "production" else ""
        loaded = f"{len(row['workers'])}" if row["workers"] else ""
        inputs, outputs = (", ".join(row[side]) for side in ("inputs", "outputs"))
        table.add_row(
            row["name"], row["version"], stage, row["content_hash"][:_SHORT_HASH], active, loaded, inputs, outputs
        )
    return table if rows else Text("No model is registered. Expected `penstock models register PATH`")


def draw_version(version: RegisteredVersion) -> RenderableType:
    """The record of one version, one field a line, and its files."""
    facts = {
        "stage": str(version.stage),
        "content hash": version.content_hash,
        "format": str(version.spec.get("format", "")),
        "registered": version.registered_at,
        "in production since" if version.stage == "production" else "first in production": version.released_at or "-",
        "source": version.source,
    }
    table = _table(version.reference, "")
    for name, value in facts.items():
        table.add_row(name, value)
    files = _table("file", "SHA-256")
    for path, digest in {**version.files, **version.source_files}.items():
        files.add_row(path, digest)
    return Group(table, Text(), files)


def draw_history(history: Sequence[Transition]) -> RenderableType:
    """One line per change, in the given order."""
    table = _table("epoch", "time", "action", "version", "content hash", "from", "to", "replaced", "operator", "reason")
    for change in history:
        table.add_row(
            str(change.epoch),
            change.at[:19],
            str(change.action),
            change.version,
            change.content_hash[:_SHORT_HASH],
            str(change.before or ""),
            str(change.after),
            change.replaced or "",
            change.actor,
            change.reason,
        )
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table
