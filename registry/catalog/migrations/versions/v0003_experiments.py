"""Experiments: the arms that share a model's jobs, one open experiment per model."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_OPEN: Final = sa.text("status IN ('running', 'paused')")


def upgrade() -> None:
    """From the tables of models, versions, transitions and heads of audit chains."""
    op.create_table(
        "penstock_experiments",
        sa.Column("name", sa.String(64), sa.ForeignKey("penstock_models.name", name="fk_experiments_models")),
        sa.Column("experiment", sa.String(64)),
        sa.Column("kind", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("arms", sa.Text, nullable=False),
        sa.Column("assignment", sa.String(16), nullable=False),
        sa.Column("plan", sa.Text, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("begun_at", sa.String(32), nullable=False),
        sa.Column("changed_at", sa.String(32), nullable=False),
        sa.Column("actor", sa.String(500), nullable=False),
        sa.Column("signature", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("name", "experiment"),
        sa.CheckConstraint("status IN ('running', 'paused', 'completed', 'stopped')", name="ck_experiments_status"),
    )
    op.create_index(
        "ix_experiments_one_open",
        "penstock_experiments",
        ["name"],
        unique=True,
        sqlite_where=_OPEN,
        postgresql_where=_OPEN,
    )
