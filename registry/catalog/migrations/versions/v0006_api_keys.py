"""API keys: the callers of the gateway, with the digests of their keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """From the tables of models, experiments, goldens and policies."""
    op.create_table(
        "penstock_api_keys",
        sa.Column("id", sa.String(12)),
        sa.Column("label", sa.String(100), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("role", sa.String(16), nullable=False),
        sa.Column("tenant", sa.String(64), nullable=False),
        sa.Column("models", sa.Text, nullable=False),
        sa.Column("requests_per_minute", sa.BigInteger, nullable=False),
        sa.Column("tokens_per_minute", sa.BigInteger, nullable=False),
        sa.Column("requests_per_day", sa.BigInteger, nullable=False),
        sa.Column("requests_per_month", sa.BigInteger, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("revoked_at", sa.BigInteger),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sa.CheckConstraint("role IN ('admin', 'user', 'readonly')", name="ck_api_keys_role"),
    )
    op.create_index("ix_api_keys_revision", "penstock_api_keys", ["revision"], unique=True)
