"""The tiers of the cache that outlive a process: CPU per entry, beside SQLite without encryption and a dictionary.

L2 has 20,000 entries of 1.5 kB, and reads of few thousand of them in random order, after a first round. What a call
returns is dropped before the next one: lists of all values would add the page faults of their memory to each read.
"""

from __future__ import annotations

import random
import sqlite3
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final, TypeVar

from penstock.safety.cache_entry import EntryKey
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
from penstock.workers.cache.tier import Put
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

T = TypeVar("T")
_VALUE_BYTES: Final = 1536
_ENTRIES: Final = 20_000
_READ: Final = 2048
_BATCH: Final = 64
_MANY: Final = 128
_ROUNDS: Final = 7
_GET: Final = "L2 get with decryption, warm, 1.5 kB"
_GET_MANY: Final = f"L2 get_many of {_MANY}, each"
_PUT: Final = f"L2 put, batches of {_BATCH}, each"
_LIMITS_US: Final = {_GET: 10.0, _GET_MANY: 5.0, _PUT: 60.0}
_BESIDE: Final = {
    "L2 get, plain values": "plain get",
    f"L2 get_many of {_MANY} that misses, each": "miss",
    "SQLite: SELECT of one value by its key, without lifetimes and encryption": "sqlite get",
    "a dictionary: one look-up": "dict get",
}


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    rnd = random.Random(scale.jobs)
    entries = scale.stored_jobs if scale.stored_jobs < _ENTRIES else _ENTRIES
    puts = [
        Put(EntryKey("0" * 64, rnd.randbytes(16), "default"), rnd.randbytes(_VALUE_BYTES), 3600) for _ in range(entries)
    ]
    keys = [put.key for put in rnd.choices(puts, k=_READ)]
    batches = [keys[begin : begin + _MANY] for begin in range(0, _READ, _MANY)]
    absent = [[EntryKey("0" * 64, rnd.randbytes(16), "default") for _ in range(_MANY)] for _ in batches]
    with _cache(rnd.randbytes(32)) as sealed, _cache(None) as plain, _table(puts) as table:
        put_us = median(_put_all(sealed, puts) for _ in range(scale.rounds))
        _put_all(plain, puts)
        values = {put.key.digest: put.value for put in puts}
        select = "SELECT value FROM entries WHERE digest = ?"
        runs: dict[str, Callable[[], object]] = {
            _GET: lambda: _each(sealed.get, keys),
            _GET_MANY: lambda: _each(sealed.get_many, batches),
            "plain get": lambda: _each(plain.get, keys),
            "miss": lambda: _each(sealed.get_many, absent),
            "sqlite get": lambda: _each(lambda key: table.execute(select, (key.digest,)).fetchone(), keys),
            "dict get": lambda: _each(lambda key: values.get(key.digest), keys),
        }
        if [sealed.get(key) for key in keys] != [values[key.digest] for key in keys]:
            raise ValueError("Wrong answers from L2")
        us = {_PUT: put_us, **_interleaved(runs)}
    say("tiers: " + ", ".join(f"{name} {figure:.1f} us" for name, figure in us.items()))
    ratios = f"{us[_GET] / us['sqlite get']:.1f}x SQLite, {us[_GET] / us['dict get']:,.0f}x a dictionary"
    rows = [_row(name, us[name], limit_us, ratios if name == _GET else "") for name, limit_us in _LIMITS_US.items()]
    beside = [Row(what, f"{us[name]:.2f} us", figures={"cpu_us": us[name]}) for what, name in _BESIDE.items()]
    return rows + beside


def _row(name: str, cpu_us: float, limit_us: float, ratios: str) -> Row:
    measured = f"{cpu_us:.1f} us of CPU" + (f"; {ratios}" if ratios else "")
    return Row(name, measured, f"<= {limit_us:g} us", ok=verdict(required=cpu_us <= limit_us), figures={"us": cpu_us})


def _interleaved(runs: dict[str, Callable[[], object]]) -> dict[str, float]:
    """The median of CPU microseconds for each, in turns."""
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_ROUNDS):
        for name, run in runs.items():
            begun = time.process_time()
            run()
            spent[name].append((time.process_time() - begun) / _READ * 1e6)
    return {name: median(figures) for name, figures in spent.items()}


def _each(call: Callable[[T], object], arguments: Sequence[T]) -> None:
    for argument in arguments:
        call(argument)


def _put_all(cache: L2Cache, puts: list[Put]) -> float:
    begun = time.process_time()
    stored = sum(cache.put_many(puts[begin : begin + _BATCH]) for begin in range(0, len(puts), _BATCH))
    if stored != len(puts):
        raise ValueError(f"L2 stored {stored} of {len(puts)} entries")
    return (time.process_time() - begun) / len(puts) * 1e6


@contextmanager
def _cache(key: bytes | None) -> Iterator[L2Cache]:
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        config = L2CacheConfig(db_path=Path(folder) / "cache.db", encryption_key=key)
        with closing(L2Cache(config)) as cache:
            yield cache


@contextmanager
def _table(puts: list[Put]) -> Iterator[sqlite3.Cursor]:
    """The values in a plain table of SQLite in the order of their keys."""
    with (
        tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder,
        closing(sqlite3.connect(Path(folder) / "plain.db", isolation_level=None)) as connection,
    ):
        for statement in (
            "PRAGMA page_size = 8192",
            "PRAGMA journal_mode = WAL",
            # As L2: all pages stay in memory.
            "PRAGMA cache_size = -65536",
            "CREATE TABLE entries (digest BLOB PRIMARY KEY, value BLOB) WITHOUT ROWID",
            "BEGIN",
        ):
            connection.execute(statement)
        connection.executemany("INSERT INTO entries VALUES (?, ?)", ((put.key.digest, put.value) for put in puts))
        connection.execute("COMMIT")
        yield connection.cursor()
