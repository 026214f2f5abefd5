"""What Alembic runs for an upgrade: the revisions, inside the transaction of the connection it was given."""

from __future__ import annotations

from alembic import context

from penstock.registry.catalog.tables import SCHEMA_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=SCHEMA_TABLE,
    # SQLite can undo the making of a table, so a process that is killed half-way leaves nothing.
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
