"""The versions of models as people see them: from the registry and from what runs, as plain data and as tables.

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

from penstock.compose.deploy import deployed
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
    """Every version that is registered, or that a worker serves without: where it stands, and who has it.

    `is_active`: whether it answers jobs that name no version; `workers`: those that have it in memory. A registered
    version in production that is not active has yet to be flipped. Raises BrokerUnavailable.
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
    """What is known of the model's spec, and the versions in workers, where the registry has none of them."""
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
            said = report.get("versions", {}).get(name, {}).get(label, {})
            if said.get("state") == "ready":
                row["workers"].append(report["name"])
                row["content_hash"] = row["content_hash"] or said["content_hash"]


def _active_labels(broker: FleetEnd, name: str, reports: Iterable[Mapping[str, Any]]) -> set[str]:
    """What was promoted; before the first promotion, what the workers chose themselves."""
    try:
        decision = deployed(broker, name)
    except Corrupt:
        # Workers believe no such record, and doctor tells.
        decision = None
    if decision is not None:
        return {decision.version}
    return {report["models"][name] for report in reports if name in report["models"]}


def as_data(version: RegisteredVersion) -> dict[str, Any]:
    """A version with all that the registry knows of it, ready for JSON."""
    return {**asdict(version), "stage": str(version.stage), "lineage": version.lineage.model_dump()}


def draw_versions(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A line per version, with what each takes and gives."""
    table = _table("model", "version", "stage", "content", "answers", "loaded by", "inputs", "outputs")
    for row in rows:
        stage = row["stage"] or "not registered"
        answers = "yes" if row["is_active"] else "not yet" if row["stage"] == "production" else ""
        loaded = f"{len(row['workers'])}" if row["workers"] else ""
        inputs, outputs = (", ".join(row[side]) for side in ("inputs", "outputs"))
        table.add_row(
            row["name"], row["version"], stage, row["content_hash"][:_SHORT_HASH], answers, loaded, inputs, outputs
        )
    return table if rows else Text("No model is registered. `penstock models register PATH` does that.")


def draw_version(version: RegisteredVersion) -> RenderableType:
    """Everything about one version, a line each."""
    facts = {
        "stage": str(version.stage),
        "content": version.content_hash,
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
    """A line per change, in the order given."""
    table = _table("epoch", "when", "what", "version", "content", "from", "to", "replaced", "by", "reason")
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
