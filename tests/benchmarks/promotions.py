"""Operators who promote and roll back one model at once: how many versions are in production, at every moment."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale
from tests.faults.promoters import race
from tests.servers import PostgresDatabase

__all__ = ["measure"]

_PROCESSES: Final = 20


def measure(scale: Scale, say: Progress) -> list[Row]:
    """20 processes, on SQLite and on PostgreSQL; without a PostgreSQL its row says so."""
    rows = []
    for kind in ("SQLite", "PostgreSQL"):
        what = f"{_PROCESSES} processes, {scale.promotions} promotions and rollbacks each, {kind}"
        say(what)
        try:
            with tempfile.TemporaryDirectory() as folder, _database(kind, Path(folder)) as url:
                rows.append(_measured(what, url, Path(folder), scale.promotions))
        except pytest.skip.Exception as missing:
            rows.append(Row(what, f"not run: {missing.msg}"))
    return rows


@contextmanager
def _database(kind: str, folder: Path) -> Iterator[str]:
    if kind == "SQLite":
        yield f"sqlite:///{folder}/registry.db"
        return
    database = PostgresDatabase().create()
    try:
        yield database.url
    finally:
        database.drop()


def _measured(what: str, url: str, folder: Path, times: int) -> Row:
    begun = time.monotonic()
    found = race(url, folder, processes=_PROCESSES, times=times)
    seconds = time.monotonic() - begun
    if found.unexpected or found.missing:
        raise ValueError(f"{what}: {found.missing} steps unseen; {found.unexpected[:1]}")
    return Row(
        f"{what}: moments with other than one PRODUCTION",
        f"{found.others} of {found.moments:,} ({found.outcomes['done']:,} done, "
        f"{found.told:,} refused with the reason, {seconds:.0f} s)",
        "0",
        ok=verdict(required=found.others == 0),
        figures={
            "others": found.others,
            "moments": found.moments,
            "done": found.outcomes["done"],
            "told": found.told,
            "seconds": seconds,
        },
    )
