"""The heads of audit chains in the registry's database: one row for each writer."""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import bindparam, select, text, update

from penstock.registry.audit_heads import AuditHead
from penstock.registry.catalog.database import Database
from penstock.registry.catalog.tables import audit_heads

__all__ = ["SqlAuditHeads"]


class SqlAuditHeads:
    """AuditHeads in a database. A head never goes back to an earlier entry. Calls raise RegistryUnavailable.

    Raises ConfigurationError for an unusable URL.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url)

    def put(self, heads: Mapping[str, AuditHead]) -> None:
        """See AuditHeads.put."""
        rows = [{"of": writer, "at": head.sequence, "its": head.mac} for writer, head in heads.items()]
        if not rows:
            return
        new = text(
            f"INSERT INTO {audit_heads.name} (writer, sequence, mac) "  # noqa: S608 - a constant
            "VALUES (:of, :at, :its) ON CONFLICT DO NOTHING"
        )
        newer = (
            update(audit_heads)
            .where(audit_heads.c.writer == bindparam("of"), audit_heads.c.sequence < bindparam("at"))
            .values(sequence=bindparam("at"), mac=bindparam("its"))
        )
        with self._database.writing() as connection:
            connection.execute(new, rows)
            connection.execute(newer, rows)

    def all(self) -> dict[str, AuditHead]:
        """See AuditHeads.all."""
        with self._database.reading() as connection:
            return {row.writer: AuditHead(row.sequence, row.mac) for row in connection.execute(select(audit_heads))}
