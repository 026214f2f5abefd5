"""A cache on disk for tests, with clocks of their own, and a look into its file from outside."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final

from penstock.workers.cache.l2 import L2Cache, L2CacheConfig

__all__ = ["HOUR_S", "KEY", "Clock", "cache_at", "disk_bytes", "rows_of", "run_sql"]

KEY: Final = bytes(range(32))
HOUR_S: Final = 3600


class Clock:
    """A clock that a test moves."""

    def __init__(self, now: float = 1_763_900_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@contextmanager
def cache_at(
    folder: Path, *, clock: Clock | None = None, monotonic: Clock | None = None, **config: Any
) -> Iterator[L2Cache]:
    """A cache in this folder, with a key unless another one is given, closed at the end."""
    clocks = {"clock": clock, "monotonic": monotonic}
    cache = L2Cache(
        L2CacheConfig(db_path=folder / "cache.db", **{"encryption_key": KEY, **config}),
        **{name: each for name, each in clocks.items() if each is not None},
    )
    try:
        yield cache
    finally:
        cache.close()


def run_sql(file: Path, sql: str, parameters: tuple[object, ...] = ()) -> list[tuple[Any, ...]]:
    """Run one statement on the file, over a connection of its own."""
    with closing(sqlite3.connect(file)) as connection, connection:
        return connection.execute(sql, parameters).fetchall()


def rows_of(file: Path) -> list[tuple[int, bytes, bytes]]:
    """(id, front, data) of all rows."""
    return run_sql(file, "SELECT id, front, data FROM entries")


def disk_bytes(folder: Path) -> int:
    """The bytes of the cache's files."""
    return sum(path.stat().st_size for path in folder.iterdir())
