"""The goldens of model versions in the registry's database: a bounded number of rows for each version.

A row holds bytes that safety/golden_archive.py makes and reads. It belongs to one content of the version: when other
content is served under the same label, the rows of the old one go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from sqlalchemy import bindparam, delete, select, text

from penstock.registry.catalog.database import Database
from penstock.registry.catalog.tables import goldens

__all__ = ["MOST_GOLDENS", "GoldenOwner", "SqlGoldens"]

MOST_GOLDENS: Final = 128
"""Rows of one version: the samples of two workers."""


class GoldenOwner(NamedTuple):
    """The content of a version that answered."""

    model: str
    version: str
    content_hash: str


class SqlGoldens:
    """The rows in a database. Calls raise RegistryUnavailable.

    Raises ConfigurationError for an unusable URL.
    """

    def __init__(self, url: str) -> None:
        self._database = Database(url)

    def put(self, owner: GoldenOwner, samples: Mapping[str, bytes], saved_at: int) -> None:
        """Adds samples by digest; one that is there stays. The oldest rows beyond MOST_GOLDENS go.

        saved_at: unix seconds.
        """
        rows = [
            {**owner._asdict(), "digest": digest, "saved_at": saved_at, "sample": sample}
            for digest, sample in samples.items()
        ]
        columns = ", ".join(rows[0]) if rows else ""
        of_version = (goldens.c.model == owner.model) & (goldens.c.version == owner.version)
        newest = select(goldens.c.digest).where(of_version).order_by(goldens.c.saved_at.desc(), goldens.c.digest)
        with self._database.writing() as connection:
            connection.execute(delete(goldens).where(of_version, goldens.c.content_hash != owner.content_hash))
            if rows:
                values = ", ".join(f":{name}" for name in rows[0])
                statement = text(
                    f"INSERT INTO {goldens.name} ({columns}) VALUES ({values}) ON CONFLICT DO NOTHING"  # noqa: S608 - constants
                )
                connection.execute(statement, rows)
            beyond = [row.digest for row in connection.execute(newest.offset(MOST_GOLDENS))]
            if beyond:
                gone = delete(goldens).where(of_version, goldens.c.digest == bindparam("gone"))
                connection.execute(gone, [{"gone": digest} for digest in beyond])

    def of(self, owner: GoldenOwner) -> dict[str, bytes]:
        """The samples of this content by digest, oldest first."""
        rows = (
            select(goldens.c.digest, goldens.c.sample)
            .where(
                goldens.c.model == owner.model,
                goldens.c.version == owner.version,
                goldens.c.content_hash == owner.content_hash,
            )
            .order_by(goldens.c.saved_at, goldens.c.digest)
        )
        with self._database.reading() as connection:
            return {row.digest: bytes(row.sample) for row in connection.execute(rows)}

    def forget(self, model: str, version: str | None = None) -> int:
        """Removes the samples of a version, or of all versions of a model; returns how many there were."""
        chosen = delete(goldens).where(goldens.c.model == model)
        if version is not None:
            chosen = chosen.where(goldens.c.version == version)
        with self._database.writing() as connection:
            return connection.execute(chosen).rowcount
