"""The registry's tables and records: a row is a record and the signature of its writer.

    RegisteredVersion, Transition, Experiment, PolicyRecord -> seal_row -> SQLite or PostgreSQL
                the record <- open_version, open_transition, open_experiment, open_policy

The heads of audit chains need no signature: each one is a MAC with the key of the audit log. Goldens are sealed by
data keys instead, and API keys are there as digests.

penstock_models has one row per model, which a change of the model locks. A unique index allows one PRODUCTION per
model, and another one open experiment. registry/catalog/migrations makes the schema; a test compares the two.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, TypeAlias

import msgspec
from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    text,
)

from penstock.registry.catalog.lineage import ModelLineage
from penstock.registry.catalog.stages import ModelStage, TransitionAction
from penstock.registry.deployment import DeployedArm, ExperimentKind, Routing
from penstock.registry.errors import BadSignature
from penstock.registry.signed import Signer, Verifier, open_record, seal_record

__all__ = [
    "SCHEMA_TABLE",
    "Experiment",
    "ExperimentStatus",
    "PolicyRecord",
    "RegisteredVersion",
    "Transition",
    "api_keys",
    "audit_heads",
    "goldens",
    "experiments",
    "metadata",
    "models",
    "open_experiment",
    "open_policy",
    "open_transition",
    "open_version",
    "policies",
    "seal_row",
    "transitions",
    "versions",
]

ExperimentStatus: TypeAlias = Literal["running", "paused", "completed", "stopped"]
"""`paused`: its arms share the jobs, and no step is decided. `stopped`: the version in production answers all jobs."""

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

experiments: Final = Table(
    "penstock_experiments",
    metadata,
    Column("name", String(64), ForeignKey("penstock_models.name", name="fk_experiments_models"), primary_key=True),
    Column("experiment", String(64), primary_key=True),
    Column("kind", String(16), nullable=False),
    Column("status", String(16), nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("arms", Text, nullable=False),
    Column("assignment", String(16), nullable=False),
    Column("plan", Text, nullable=False),
    Column("state", Text, nullable=False),
    Column("begun_at", String(32), nullable=False),
    Column("changed_at", String(32), nullable=False),
    Column("actor", String(500), nullable=False),
    Column("signature", String(256), nullable=False),
    CheckConstraint("status IN ('running', 'paused', 'completed', 'stopped')", name="ck_experiments_status"),
    Index(
        "ix_experiments_one_open",
        "name",
        unique=True,
        sqlite_where=text("status IN ('running', 'paused')"),
        postgresql_where=text("status IN ('running', 'paused')"),
    ),
)

policies: Final = Table(
    "penstock_policies",
    metadata,
    Column("name", String(64), ForeignKey("penstock_models.name", name="fk_policies_models"), primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("endpoints", Text, nullable=False),
    Column("changed_at", String(32), nullable=False),
    Column("actor", String(500), nullable=False),
    Column("signature", String(256), nullable=False),
)

audit_heads: Final = Table(
    "penstock_audit_heads",
    metadata,
    Column("writer", String(200), primary_key=True),
    Column("sequence", BigInteger, nullable=False),
    Column("mac", String(64), nullable=False),
)
"""See registry/audit_heads.py."""

goldens: Final = Table(
    "penstock_goldens",
    metadata,
    Column("model", String(64), primary_key=True),
    Column("version", String(64), primary_key=True),
    Column("digest", String(32), primary_key=True),
    Column("content_hash", String(64), nullable=False),
    Column("saved_at", BigInteger, nullable=False),
    Column("sample", LargeBinary, nullable=False),
)
"""See registry/catalog/goldens.py."""

api_keys: Final = Table(
    "penstock_api_keys",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("label", String(100), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("role", String(16), nullable=False),
    Column("tenant", String(64), nullable=False),
    Column("models", Text, nullable=False),
    Column("requests_per_minute", BigInteger, nullable=False),
    Column("tokens_per_minute", BigInteger, nullable=False),
    Column("requests_per_day", BigInteger, nullable=False),
    Column("requests_per_month", BigInteger, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("revoked_at", BigInteger),
    Column("revision", BigInteger, nullable=False),
    CheckConstraint("role IN ('admin', 'user', 'readonly')", name="ck_api_keys_role"),
    Index("ix_api_keys_revision", "revision", unique=True),
)
"""See registry/catalog/api_keys.py."""


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


@dataclass(frozen=True, slots=True)
class Experiment:
    """One experiment of a model. Times are ISO 8601, in UTC."""

    name: str
    experiment: str
    """Its id."""
    kind: ExperimentKind
    status: ExperimentStatus
    epoch: int
    """The model's epoch at the last change of the experiment."""
    arms: tuple[DeployedArm, ...]
    assignment: Literal["weighted", "sticky"]
    """`sticky`: all jobs of one sticky key have one version."""
    plan: Mapping[str, Any]
    """What was ordered at the start; see safety/rollout.py."""
    state: Mapping[str, Any]
    """How far it is."""
    begun_at: str
    changed_at: str
    actor: str
    """Who made the last change."""

    @property
    def is_open(self) -> bool:
        """Whether its arms share the jobs."""
        return self.status in ("running", "paused")

    @property
    def routing(self) -> Routing | None:
        """The part of the active version's record; None for an experiment that is over."""
        if not self.is_open:
            return None
        return Routing(self.experiment, self.kind, self.arms, self.assignment == "sticky")


@dataclass(frozen=True, slots=True)
class PolicyRecord:
    """The knobs of a model's endpoints that operators have set over those of every version's model.yaml."""

    name: str
    epoch: int
    """The model's epoch at the last change."""
    endpoints: Mapping[str, Mapping[str, Any]]
    """By endpoint; see registry/package/policy_overlay.py."""
    changed_at: str
    """ISO 8601, in UTC."""
    actor: str
    """Who made the last change."""


_Record: TypeAlias = RegisteredVersion | Transition | Experiment | PolicyRecord


def seal_row(record: _Record, sign: Signer | None) -> dict[str, object]:
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
    except (ValueError, TypeError, msgspec.ValidationError):
        raise BadSignature(f"{context}: not a valid record") from None


def _record(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != "signature"}


def open_experiment(row: Mapping[str, Any], verify: Verifier | None) -> Experiment:
    """The record of a row. Raises BadSignature unless a known operator has signed it."""
    with _opened(row, f"registry experiment {row['name']} {row['experiment']}", verify) as record:
        arms = msgspec.convert(json.loads(row["arms"]), tuple[DeployedArm, ...])
        plan, state = json.loads(row["plan"]), json.loads(row["state"])
        return Experiment(**{**record, "arms": arms, "plan": plan, "state": state})


def open_policy(row: Mapping[str, Any], verify: Verifier | None) -> PolicyRecord:
    """The record of a row. Raises BadSignature unless a known operator has signed it."""
    with _opened(row, f"registry policy {row['name']}", verify) as record:
        return PolicyRecord(**{**record, "endpoints": json.loads(row["endpoints"])})


def _fields_of(record: _Record) -> dict[str, object]:
    return {field.name: getattr(record, field.name) for field in fields(record)}


def _as_column(value: object) -> object:
    if isinstance(value, ModelLineage):
        return _canonical(value.model_dump())
    if isinstance(value, tuple):
        return _canonical(msgspec.to_builtins(value))
    return _canonical(value) if isinstance(value, Mapping) else value


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _payload(row: Mapping[str, Any]) -> bytes:
    return _canonical(_record(row)).encode()


def _context(record: _Record) -> str:
    if isinstance(record, PolicyRecord):
        return f"registry policy {record.name}"
    if isinstance(record, Experiment):
        return f"registry experiment {record.name} {record.experiment}"
    if isinstance(record, Transition):
        return f"registry transition {record.name} {record.epoch}"
    return f"registry version {record.name} {record.version}"
