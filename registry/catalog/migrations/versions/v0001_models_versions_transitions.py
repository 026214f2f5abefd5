"""Models, their versions and transitions; one production version per model; the database enforces frozen fields."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_IN_PRODUCTION: Final = sa.text("stage = 'production'")
_FREEZE_IN_SQLITE: Final = """
    CREATE TRIGGER penstock_freeze BEFORE UPDATE ON penstock_versions
    WHEN NEW.content_hash <> OLD.content_hash OR (
        OLD.released_at IS NOT NULL AND (NEW.lineage <> OLD.lineage OR NEW.released_at IS NOT OLD.released_at)
    )
    BEGIN
        SELECT RAISE(ABORT, 'content is frozen, and so is the lineage of what was in production');
    END
"""
_FREEZE_IN_POSTGRESQL: Final = (
    """
    CREATE FUNCTION penstock_freeze() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'content is frozen, and so is the lineage of what was in production'
        USING ERRCODE = 'integrity_constraint_violation';
    END $$
    """,
    """
    CREATE TRIGGER penstock_freeze BEFORE UPDATE ON penstock_versions FOR EACH ROW
    WHEN (NEW.content_hash <> OLD.content_hash OR (
        OLD.released_at IS NOT NULL
        AND (NEW.lineage <> OLD.lineage OR NEW.released_at IS DISTINCT FROM OLD.released_at)
    ))
    EXECUTE FUNCTION penstock_freeze()
    """,
)


def upgrade() -> None:
    """From nothing."""
    op.create_table("penstock_models", sa.Column("name", sa.String(64), primary_key=True))
    _create_versions()
    _create_transitions()
    is_sqlite = op.get_context().dialect.name == "sqlite"
    for statement in (_FREEZE_IN_SQLITE,) if is_sqlite else _FREEZE_IN_POSTGRESQL:
        op.execute(statement)


def _create_versions() -> None:
    op.create_table(
        "penstock_versions",
        sa.Column("name", sa.String(64), sa.ForeignKey("penstock_models.name", name="fk_versions_models")),
        sa.Column("version", sa.String(64)),
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("stage", sa.String(16), nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("files", sa.Text, nullable=False),
        sa.Column("source_files", sa.Text, nullable=False),
        sa.Column("spec", sa.Text, nullable=False),
        sa.Column("source", sa.Text, nullable=False),
        sa.Column("lineage", sa.Text, nullable=False),
        sa.Column("registered_at", sa.String(32), nullable=False),
        sa.Column("released_at", sa.String(32)),
        sa.Column("signature", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("name", "version"),
        sa.CheckConstraint("stage IN ('draft', 'staging', 'production', 'archived')", name="ck_versions_stage"),
    )
    op.create_index("ix_versions_content", "penstock_versions", ["name", "content_hash"], unique=True)
    op.create_index(
        "ix_versions_one_production",
        "penstock_versions",
        ["name"],
        unique=True,
        sqlite_where=_IN_PRODUCTION,
        postgresql_where=_IN_PRODUCTION,
    )


def _create_transitions() -> None:
    op.create_table(
        "penstock_transitions",
        sa.Column("name", sa.String(64), sa.ForeignKey("penstock_models.name", name="fk_transitions_models")),
        sa.Column("epoch", sa.Integer),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("version", sa.String(64), nullable=False),
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("before", sa.String(16)),
        sa.Column("after", sa.String(16), nullable=False),
        sa.Column("replaced", sa.String(64)),
        sa.Column("productions", sa.Text, nullable=False),
        sa.Column("actor", sa.String(500), nullable=False),
        sa.Column("reason", sa.String(500), nullable=False),
        sa.Column("at", sa.String(32), nullable=False),
        sa.Column("signature", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("name", "epoch"),
    )
