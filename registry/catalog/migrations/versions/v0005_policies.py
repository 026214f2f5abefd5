"""Policies: the knobs of a model's endpoints that operators have set at run time."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From the tables of models, versions, transitions, heads of audit chains, experiments and goldens."""
    op.create_table(
        "penstock_policies",
        sa.Column("name", sa.String(64), sa.ForeignKey("penstock_models.name", name="fk_policies_models")),
        sa.Column("epoch", sa.Integer, nullable=False),
        sa.Column("endpoints", sa.Text, nullable=False),
        sa.Column("changed_at", sa.String(32), nullable=False),
        sa.Column("actor", sa.String(500), nullable=False),
        sa.Column("signature", sa.String(256), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
