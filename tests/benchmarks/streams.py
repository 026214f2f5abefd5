"""Streams of many small chunks: chunks per second, CPU and memory of a chunk, and the latency of the first one.

The model notes the time of each `yield` in the chunk. The subscriber's process and the worker share a clock.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import yaml

from penstock import Client, JobHandle
from tests.benchmarks import meter
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import RedisServer, WorkerProcess

__all__ = ["measure"]

_CHUNKS: Final = 20_000
_STREAMS: Final = 8
_STEP_MS: Final = 10.0
_FIRSTS: Final = 150
_PAUSE_S: Final = 0.02
_TIMEOUT_S: Final = 300.0
_SOURCE: Final = """
import time

import numpy as np

def build():
    return stream

def stream(inputs, ctx):
    count, step_s = int(inputs["count"][0]), float(inputs["step_ms"][0]) / 1000
    for number in range(count):
        if step_s:
            time.sleep(step_s)
        yield {"at": np.array([time.monotonic()])}
    return {"count": np.array([count])}
"""


class _Spent(NamedTuple):
    """CPU microseconds per chunk, and chunks per second."""

    worker_us: float
    broker_us: float
    per_s: float


class _Bench:
    """One worker with eight model threads, its Redis, and a client."""

    def __init__(self, harness: Harness) -> None:
        root = harness.folder()
        _write(root)
        self.server: RedisServer = harness.redis()
        self.worker: WorkerProcess = harness.worker(self.server, "tokens", models_root=root)
        self.client: Client = harness.producer(self.server)
        self.run([(1, 0.0)])

    def submit(self, count: int, step_ms: float) -> JobHandle:
        """A stream of so many chunks."""
        return self.client.submit("tokens", {"count": [count], "step_ms": [step_ms]})

    def run(self, streams: Sequence[tuple[int, float]]) -> _Spent:
        """These streams at a time, (chunks, pause in ms) each, without a subscriber."""
        before = self._cpu_s()
        begun = time.monotonic()
        for job in [self.submit(*stream) for stream in streams]:
            job.result(_TIMEOUT_S)
        seconds, chunks = time.monotonic() - begun, sum(count for count, _ in streams)
        worker_s, broker_s = (after - first for first, after in zip(before, self._cpu_s(), strict=True))
        return _Spent(worker_s / chunks * 1e6, broker_s / chunks * 1e6, chunks / seconds)

    def _cpu_s(self) -> tuple[float, float]:
        return meter.cpu_seconds(meter.tree(self.worker.pid)), meter.cpu_seconds([self.server.pid])

    def used_bytes(self) -> int:
        """What Redis holds now."""
        with self.server.client() as redis:
            return int(redis.info("memory")["used_memory"])

    def first_ms(self) -> float:
        """From the first `yield` of a stream until a subscriber has the chunk."""
        for event in self.submit(1, 1.0).stream():
            if event.type == "chunk":
                return (time.monotonic() - float(event.data["at"][0])) * 1000
        raise RuntimeError("a stream without a chunk")


def measure(scale: Scale, say: Progress) -> list[Row]:
    """One long stream, eight streams side by side, and first chunks with and without others beside them."""
    chunks = _CHUNKS if scale.rounds > 1 else _CHUNKS // 40
    firsts = _FIRSTS if scale.rounds > 1 else 5
    with Harness() as harness:
        bench = _Bench(harness)
        empty = bench.used_bytes()
        alone = bench.run([(chunks, 0.0)])
        weight = (bench.used_bytes() - empty) / chunks
        longer = [bench.run([(chunks, 0.0)]) for _ in range(scale.rounds - 1)]
        beside = bench.run([(max(5, chunks // 100), _STEP_MS)] * _STREAMS)
        lone_ms = []
        for _ in range(firsts):
            lone_ms.append(bench.first_ms())
            time.sleep(_PAUSE_S)
        with ThreadPoolExecutor(1) as pool:
            busy = pool.submit(bench.run, [(firsts * 6, _STEP_MS)] * (_STREAMS - 1))
            busy_ms = [bench.first_ms() for _ in range(firsts)]
            busy.result()
    say(f"streams: {alone.per_s:.0f} chunks/s, {alone.worker_us:.1f} us worker, {weight:.0f} bytes a chunk")
    return [
        _long_row(chunks, [alone, *longer]),
        _weight_row(chunks, weight),
        Row(
            f"{_STREAMS} streams side by side, a chunk each {_STEP_MS:g} ms, CPU of worker / Redis per chunk",
            f"{beside.worker_us:.0f} / {beside.broker_us:.0f} us",
            figures=beside._asdict(),
        ),
        _first_row("a lone first chunk, from its yield to its subscriber, p50 / p99", lone_ms),
        _first_row(f"the same beside {_STREAMS - 1} busy streams of its worker", busy_ms),
    ]


def _long_row(chunks: int, rounds: Sequence[_Spent]) -> Row:
    per_s, worker_us = (median(getattr(each, name) for each in rounds) for name in ("per_s", "worker_us"))
    return Row(
        f"a stream of {chunks:,} chunks of 8 B: chunks/s, CPU of worker / Redis per chunk",
        f"{per_s:,.0f} chunks/s, {worker_us:.0f} / {median(each.broker_us for each in rounds):.0f} us",
        ">= 20,000 chunks/s, <= 50 us of worker",
        "",
        verdict(required=per_s >= 20_000 and worker_us <= 50),
        {"per_s": per_s, "worker_us": worker_us},
    )


def _weight_row(chunks: int, weight: float) -> Row:
    what = f"Redis memory per chunk of 8 B, {chunks:,} in a stream"
    return Row(what, f"{weight:.0f} B", "<= 64 B", "", verdict(required=weight <= 64), {"bytes": weight})


def _first_row(what: str, found_ms: Sequence[float]) -> Row:
    p50, p99 = np.percentile(found_ms, (50, 99))
    return Row(what, f"{p50:.2f} / {p99:.2f} ms", figures={"p50_ms": float(p50), "p99_ms": float(p99)})


def _write(root: Path) -> None:
    folder = root / "tokens" / "1"
    folder.mkdir(parents=True)
    spec = {
        "name": "tokens",
        "version": "1",
        "format": "python",
        "entrypoint": "model:build",
        "streams": True,
        "concurrency": _STREAMS,
        "inputs": [
            {"name": "count", "dtype": "int64", "shape": [1]},
            {"name": "step_ms", "dtype": "float32", "shape": [1]},
        ],
        "outputs": [{"name": "count", "dtype": "int64", "shape": [1]}],
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    (folder / "model.py").write_text(_SOURCE)
