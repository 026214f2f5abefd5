"""The registry's tables and records: a row is a record and the signature of its writer.

    RegisteredVersion, Transition -> seal_row -> SQLite or PostgreSQL -> open_version, open_transition -> the record

penstock_models has one row per model, which a change of the model locks. A unique index allows one PRODUCTION per
model. registry/catalog/migrations makes the schema; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from sqlalchemy import CheckConstraint, Column, ForeignKey, Index, Integer, MetaData, String, Table, Text, text

from penstock.registry.catalog.lineage import ModelLineage
from penstock.registry.catalog.stages import ModelStage, TransitionAction
from penstock.registry.errors import BadSignature
from penstock.registry.signed import Signer, Verifier, open_record, seal_record

__all__ = [
    "SCHEMA_TABLE",
    "RegisteredVersion",
    "Transition",
    "metadata",
    "models",
    "open_transition",
    "open_version",
    "seal_row",
    "transitions",
    "versions",
]

SCHEMA_TABLE: Final = "penstock_schema"
"""The table in which Alembic keeps the schema's revision."""

metadata: Final = MetaData()

models: Final = Table("penstock_models", metadata, Column("name", String(64), primary_key=True))

versions: Final = Table(
    "penstock_versions",
    metadata,
    Column("name", String(64), ForeignKey("penstock_models.name", name="fk_versions_models"), primary_key=True),
    Column("version", String(64), primary_key=True),
    Column("content_hash", String(64), nullable=False),
    Column("stage", String(16), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("files", Text, nullable=False),
    Column("source_files", Text, nullable=False),
    Column("spec", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("lineage", Text, nullable=False),
    Column("registered_at", String(32), nullable=False),
    Column("released_at", String(32)),
    Column("signature", String(256), nullable=False),
    CheckConstraint("stage IN ('draft', 'staging', 'production', 'archived')", name="ck_versions_stage"),
    Index("ix_versions_content", "name", "content_hash", unique=True),
    Index(
        "ix_versions_one_production",
        "name",
        unique=True,
        sqlite_where=text("stage = 'production'"),
        postgresql_where=text("stage = 'production'"),
    ),
)

transitions: Final = Table(
    "penstock_transitions",
    metadata,
    Column("name", String(64), ForeignKey("penstock_models.name", name="fk_transitions_models"), primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("action", String(16), nullable=False),
    Column("version", String(64), nullable=False),
    Column("content_hash", String(64), nullable=False),
    Column("before", String(16)),
    Column("after", String(16), nullable=False),
    Column("replaced", String(64)),
    Column("productions", Text, nullable=False),
    Column("actor", String(500), nullable=False),
    Column("reason", String(500), nullable=False),
    Column("at", String(32), nullable=False),
    Column("signature", String(256), nullable=False),
)


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """One version of one model: its content and its stage. Times are ISO 8601, in UTC."""

    name: str
    version: str
    content_hash: str
    stage: ModelStage
    epoch: int
    """The model's epoch at this version's last change."""
    files: Mapping[str, str]
    """SHA-256 by path in the package. source_files: those of weights outside the package."""
    source_files: Mapping[str, str]
    spec: Mapping[str, Any]
    source: str
    """Where its files can be read again."""
    lineage: ModelLineage
    registered_at: str
    released_at: str | None = None
    """When it was first in production. Since then its lineage is frozen."""

    @property
    def reference(self) -> str:
        """`name/version`."""
        return f"{self.name}/{self.version}"


@dataclass(frozen=True, slots=True)
class Transition:
    """One change of a model. `epoch` counts the model's changes and never decreases."""

    name: str
    epoch: int
    action: TransitionAction
    version: str
    content_hash: str
    before: ModelStage | None
    """None for a registration."""
    after: ModelStage
    replaced: str | None
    """The version that went from PRODUCTION to ARCHIVED in this same step."""
    productions: tuple[str, ...]
    """The labels that rollbacks restore, oldest first. The last one is in production after this change."""
    actor: str
    reason: str
    at: str

    @property
    def enters_production(self) -> bool:
        """Whether this change makes another version active."""
        return self.after is ModelStage.PRODUCTION and self.before is not self.after

    def as_data(self) -> dict[str, Any]:
        """The transition as plain data for JSON."""
        return {
            **asdict(self),
            "action": str(self.action),
            "before": self.before and str(self.before),
            "after": str(self.after),
        }


def seal_row(record: RegisteredVersion | Transition, sign: Signer | None) -> dict[str, object]:
    """The row of a record, signed if there is a signer."""
    row = {name: _as_column(value) for name, value in _fields_of(record).items()}
    sealed = seal_record(_payload(row), sign, _context(record))
    return {**row, "signature": sealed.partition(b"\n")[0].decode()}


def open_version(row: Mapping[str, Any], verify: Verifier | None) -> RegisteredVersion:
    """The record of a row. Raises BadSignature unless a known operator has signed it."""
    with _opened(row, f"registry version {row['name']} {row['version']}", verify) as record:
        return RegisteredVersion(
            **{
                **record,
                "stage": ModelStage(row["stage"]),
                "files": json.loads(row["files"]),
                "source_files": json.loads(row["source_files"]),
                "spec": json.loads(row["spec"]),
                "lineage": ModelLineage.model_validate_json(row["lineage"]),
            }
        )


def open_transition(row: Mapping[str, Any], verify: Verifier | None) -> Transition:
    """The record of a row. Raises BadSignature unless a known operator has signed it."""
    with _opened(row, f"registry transition {row['name']} {row['epoch']}", verify) as record:
        return Transition(
            **{
                **record,
                "action": TransitionAction(row["action"]),
                "before": None if row["before"] is None else ModelStage(row["before"]),
                "after": ModelStage(row["after"]),
                "productions": tuple(json.loads(row["productions"])),
            }
        )


@contextmanager
def _opened(row: Mapping[str, Any], context: str, verify: Verifier | None) -> Iterator[dict[str, Any]]:
    """The columns of a row. They are parsed only after the signature was verified."""
    try:
        open_record(f"{row['signature']}\n".encode() + _payload(row), verify, context)
    except BadSignature as problem:
        raise BadSignature(f"{context}: {problem}") from None
    try:
        yield _record(row)
    except (ValueError, TypeError):
        raise BadSignature(f"{context}: not a valid record") from None


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "signature"}


def _fields_of(record: RegisteredVersion | Transition) -> dict[str, object]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _as_column(value: object) -> object:
    if isinstance(value, ModelLineage):
        return _canonical(value.model_dump())
    return _canonical(value) if isinstance(value, Mapping | tuple) else value


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _payload(row: Mapping[str, Any]) -> bytes:
    return _canonical(_record(row)).encode()


def _context(record: RegisteredVersion | Transition) -> str:
    if isinstance(record, Transition):
        return f"registry transition {record.name} {record.epoch}"
    return f"registry version {record.name} {record.version}"
