"""Idle subscribers of server-sent events: what each holds of the gateway's memory, and how late an event comes.

jobs of a paused model -> a subscriber for each -> one job at a time is cancelled -> its subscriber reads the end

The delay is from the cancelling call to the last byte of the event, so it includes the broker and this process.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import closing
from typing import Final
from urllib.parse import urlsplit

import numpy as np

from penstock import AsyncClient
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.settings import Settings
from tests.benchmarks import meter
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

_MODEL: Final = "counter"
_MOST_BYTES: Final = 30_000
_MOST_MS: Final = 50
_AT_ONCE: Final = 50
_TIMEOUT_S: Final = 60.0
_SETTLE_S: Final = 15.0
"""As long as the short silences of new subscribers, which read the records of their jobs more often."""

Subscriber = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Memory of the gateway's process tree for each subscriber, and percentiles of the delay."""
    with Harness() as harness:
        server = harness.redis()
        harness.worker(server, _MODEL)
        with closing(RedisStreams.from_url(server.url)) as broker:
            broker.pause(_MODEL)
        url, gateway = harness.gateway(server)
        settings = Settings.load(environ={**harness.settings, "PENSTOCK_REDIS_URL": server.url})
        return asyncio.run(_measure(settings, url, gateway.pid, scale, say))


async def _measure(settings: Settings, url: str, pid: int, scale: Scale, say: Progress) -> list[Row]:
    count, sampled = scale.subscribers, scale.alone_jobs
    async with AsyncClient.from_env(settings=settings) as client:
        warming = [await client.submit(_MODEL, {"count": [0]}) for _ in range(_AT_ONCE)]
        for writer in [writer for _, writer in await _subscribed(url, [job.id for job in warming])]:
            writer.close()
        jobs = await client.submit_many(_MODEL, [{"count": [number]} for number in range(count)])
        before = _resident(pid)
        subscribers: list[Subscriber] = []
        for start in range(0, count, _AT_ONCE):
            subscribers += await _subscribed(url, [job.id for job in jobs[start : start + _AT_ONCE]])
        await asyncio.sleep(_SETTLE_S)
        each = (_resident(pid) - before) / count
        say(f"gateway-streams: {count} subscribers, {each:,.0f} bytes each")
        delays_s = []
        # Spread over all of them, each once.
        for index in np.linspace(0, count - 1, min(count, sampled), dtype=int):
            begun = time.perf_counter()
            await jobs[index].cancel()
            await asyncio.wait_for(subscribers[index][0].readuntil(b"event: cancelled"), _TIMEOUT_S)
            delays_s.append(time.perf_counter() - begun)
        for _, writer in subscribers:
            writer.close()
    p50, p99 = (float(np.percentile(delays_s, percentile)) * 1000 for percentile in (50, 99))
    return [
        Row(
            f"gateway, {count:,} idle subscribers: memory of each",
            f"{each / 1000:.1f} kB",
            f"<= {_MOST_BYTES / 1000:g} kB",
            ok=verdict(required=each <= _MOST_BYTES),
            figures={"subscriber_bytes": each},
        ),
        Row(
            f"gateway, {count:,} idle subscribers: delay of an event, p99",
            f"{p99:.1f} ms (p50 {p50:.1f} ms)",
            f"<= {_MOST_MS} ms",
            ok=verdict(required=p99 <= _MOST_MS),
            figures={"p50_ms": p50, "p99_ms": p99},
        ),
    ]


async def _subscribed(url: str, job_ids: list[str]) -> list[Subscriber]:
    """A connection for each job, once the head of its answer is here."""
    return list(await asyncio.gather(*(_follow(url, job_id) for job_id in job_ids)))


async def _follow(url: str, job_id: str) -> Subscriber:
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    writer.write(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n".encode())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), _TIMEOUT_S)
    if not head.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"The gateway answered {head[:40]!r}")
    return reader, writer


def _resident(pid: int) -> int:
    return sum(map(meter.resident_bytes, meter.tree(pid)))
