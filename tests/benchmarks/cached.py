"""The cache's tiers in a worker: what a look-up costs that finds nothing, and what repeated texts gain.

Distinct jobs against the tiers on disk and in Redis; MiniLM with the same texts again, beside MiniLM without a cache.
"""

from __future__ import annotations

import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from penstock.compose import docstrings
from penstock.registry.settings_sections import CacheConfig
from penstock.safety.cache_entry import EntryKey
from penstock.safety.sealing import DataKeys
from penstock.workers.cache import AnswerCache, JobKeys, L2Cache, L2CacheConfig, L3Cache, L3CacheConfig, SharedTiers
from penstock.workers.cache.tier import Put, Tier
from tests.benchmarks import meter, mlp
from tests.benchmarks.equal import claimed_jobs
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.workers.doubles import ready_version

__all__ = ["measure"]

_CLAIM: Final = 64
_CLAIMS: Final = 64
_ROUNDS: Final = 7
_STORED: Final = 5_000
"""Entries that each tier has, so that no look-up is into an empty one."""
_TEXTS: Final = 512
_SETTLES: Final = {"PENSTOCK_INFERENCE_COMPILATION_ENABLED": "false"}
"""A compiler beside the worker would take the processor of both."""
_WITH: Final = {"PENSTOCK_INFERENCE_CACHE_ENABLED": "true"}
"""A worker of the harness has no cache otherwise."""
_TOLERANCE: Final = 1e-5
_MOST_FILLS: Final = 100
_CACHED_FILLS: Final = 5
"""So often in turn all texts must be found, before the worker counts as settled."""


class Turn(NamedTuple):
    """Texts per second, and CPU of the worker per text in microseconds."""

    texts_per_s: float
    worker_us: float


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    return [_missed(say), _repeated(scale, say)]


def _missed(say: Progress) -> Row:
    with ExitStack() as ends:
        cache, rung = _filled(ends)
        version, jobs = ready_version(), claimed_jobs(_CLAIM * _CLAIMS)
        JobKeys(isolates_tenants=True).begin_all(jobs, version.label)
        claims = [jobs[start : start + _CLAIM] for start in range(0, len(jobs), _CLAIM)]
        taken = []
        for _ in range(_ROUNDS):
            begun = time.process_time()
            for claim in claims:
                rung.clear()
                if any(cache.find_all(claim, version)):
                    raise ValueError("Wrong answers: the memory is empty")
                cache.ask(version, claim)
                rung.wait()
                ((_, found, missing),) = cache.take_answered()
                if found or len(missing) != len(claim):
                    raise ValueError("Wrong answers: the tiers have no such entry")
            taken.append((time.process_time() - begun) / len(jobs) * 1e6)
    us = median(taken)
    say(f"cached: a look-up that misses in every tier takes {us:.2f} us")
    return Row(
        f"look-up that misses in memory, on disk and in Redis, claims of {_CLAIM}, per job",
        f"{us:.2f} us of CPU",
        "<= 10 us",
        "",
        verdict(required=us <= 10),
        {"us": us},
    )


def _filled(ends: ExitStack) -> tuple[AnswerCache, threading.Event]:
    """A cache with tiers that hold other entries; the event is set when they have answered."""
    folder = Path(ends.enter_context(tempfile.TemporaryDirectory(prefix="penstock-bench-")))
    server = ends.enter_context(Harness()).redis()
    keys = DataKeys([secrets.token_bytes(32)])
    tiers: list[Tier] = [
        L2Cache(L2CacheConfig(db_path=folder / "cache.db", encryption_key=keys)),
        L3Cache(L3CacheConfig(redis_url=server.url, key_prefix="bench:"), keys),
    ]
    other = [Put(EntryKey("cd" * 32, secrets.token_bytes(16), "default"), bytes(1536), 3600) for _ in range(_STORED)]
    for tier in tiers:
        for start in range(0, len(other), 256):
            tier.put_many(other[start : start + 256])
    rung = threading.Event()
    shared = SharedTiers(
        tiers, isolates_tenants=True, may_leave=None, timeout_s=60.0, ring=rung.set, clock=time.monotonic
    )
    ends.callback(shared.close)
    return AnswerCache(CacheConfig(), time.monotonic, shared), rung


def _repeated(scale: Scale, say: Progress) -> Row:
    texts = [str(passage) for passage in docstrings.collect(_TEXTS)]
    with _minilm(_SETTLES) as plain, _minilm(_SETTLES | _WITH) as keeping:
        expected = _settled(keeping, texts)
        turns: list[tuple[Turn, Turn]] = []
        for _ in range(scale.rounds):
            without, vectors = plain.run(texts)
            again, repeated = keeping.run(texts)
            if not (np.allclose(vectors, expected, atol=_TOLERANCE) and np.array_equal(repeated, expected)):
                raise ValueError("Wrong answers: cached embeddings differ")
            turns.append((again, without))
            say(f"cached: {again.texts_per_s:,.0f} texts/s again, {without.texts_per_s:,.0f} without a cache")
    ratio = median(again.texts_per_s / without.texts_per_s for again, without in turns)
    rates = [median(turn.texts_per_s for turn in each) for each in zip(*turns, strict=True)]
    spent = [median(turn.worker_us for turn in each) for each in zip(*turns, strict=True)]
    return Row(
        f"MiniLM, {len(texts):,} texts that were asked before, against no cache",
        f"{rates[0]:,.0f} against {rates[1]:,.0f} texts/s: {ratio:.1f}x; worker {spent[0]:,.0f} against "
        f"{spent[1]:,.0f} us",
        ">= 10x",
        "",
        verdict(required=ratio >= 10),
        {"ratio": ratio, "texts_per_s": rates[0], "texts_per_s_without": rates[1]},
    )


def _settled(keeping: _Encoder, texts: list[str]) -> np.ndarray:
    """The vectors that are cached, once the worker has found its form: answers of the forms before are not given."""
    first, vectors = keeping.run(texts)
    cached = 0
    for _ in range(_MOST_FILLS):
        turn, vectors = keeping.run(texts)
        cached = cached + 1 if turn.worker_us < first.worker_us / 4 else 0
        if cached == _CACHED_FILLS:
            return vectors
    raise ValueError("The worker has not answered from its cache")


class _Encoder:
    """MiniLM behind a queue of its own."""

    def __init__(self, harness: Harness) -> None:
        server = harness.redis()
        self._worker = harness.worker(server, "minilm")
        self._client = harness.producer(server)
        self._client.map("minilm", ["warm"] * mlp.BATCH)

    def run(self, texts: list[str]) -> tuple[Turn, np.ndarray]:
        """One turn, and the vectors (texts, 384)."""
        spent, begun = meter.cpu_seconds(meter.tree(self._worker.pid)), time.perf_counter()
        vectors = np.stack(self._client.map("minilm", texts))
        seconds = time.perf_counter() - begun
        worker_s = meter.cpu_seconds(meter.tree(self._worker.pid)) - spent
        return Turn(len(texts) / seconds, worker_s / len(texts) * 1e6), vectors


@contextmanager
def _minilm(environment: dict[str, str]) -> Iterator[_Encoder]:
    with Harness(environment) as harness:
        yield _Encoder(harness)
