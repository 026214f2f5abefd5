"""`target_latency_ms` under a step of load: jobs of high priority come to a worker that is busy with a backlog.

backlog of low priority, all the time ------------.
high priority, Poisson, from some moment on -------+--> one worker, with the controller and without
"""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from penstock import AsyncClient, Client
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import Priority
from penstock.registry.settings import Settings
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale
from tests.packages import write_package

__all__ = ["measure"]

_TARGET_MS: Final = 100
_NEVER_MS: Final = 1_000_000
"""A target that is always met: nothing is steered."""
_FIXED_S: Final = 0.003
_PER_ROW_S: Final = 0.0015
_MAX_ROWS: Final = 64
_RATE: Final = 40.0
"""Jobs of high priority per second."""
_SETTLING_SHARE: Final = 0.4
"""The part of the time after the step that is not judged."""
_TIMEOUT_S: Final = 60.0
_MODEL: Final = "rowwise"
_ROWS_PER_S: Final = _MAX_ROWS / (_FIXED_S + _MAX_ROWS * _PER_ROW_S)


class Run(NamedTuple):
    """p95 of the jobs of high priority, once settled, and what was done of the backlog meanwhile."""

    p95_ms: float
    backlog_per_s: float


def measure(scale: Scale, say: Progress) -> list[Row]:
    """p95 with the controller under the target, without it over."""
    steered, alone = (_run(target_ms, scale.step_s, say) for target_ms in (_TARGET_MS, _NEVER_MS))
    batch_ms = (_FIXED_S + _MAX_ROWS * _PER_ROW_S) * 1000
    return [
        Row(
            f"step load on target_latency_ms ({_RATE:.0f} jobs/s of high priority on a backlog, a full batch takes "
            f"{batch_ms:.0f} ms): p95 with the controller / without",
            f"{steered.p95_ms:.0f} / {alone.p95_ms:.0f} ms",
            f"under {_TARGET_MS} / over {_TARGET_MS} ms",
            "",
            verdict(required=steered.p95_ms < _TARGET_MS < alone.p95_ms),
            {"p95_ms": steered.p95_ms, "p95_without_ms": alone.p95_ms},
        ),
        Row(
            "throughput of the backlog meanwhile, with the controller / without",
            f"{steered.backlog_per_s:,.0f} / {alone.backlog_per_s:,.0f} jobs/s",
            figures={"backlog_per_s": steered.backlog_per_s, "backlog_without_per_s": alone.backlog_per_s},
        ),
    ]


def _run(target_ms: int, seconds: float, say: Progress) -> Run:
    with Harness({"PENSTOCK_INFERENCE_BATCHING_TARGET_LATENCY_MS": str(target_ms)}) as harness:
        server, root = harness.redis(), harness.folder()
        _write_rowwise(root)
        harness.worker(server, _MODEL, models_root=root)
        client = harness.producer(server)
        client.map(_MODEL, _rows(_MAX_ROWS, seed=0))
        _queue_backlog(client, round(_ROWS_PER_S * seconds * 1.5))
        settings = Settings.load(environ={**harness.settings, "PENSTOCK_REDIS_URL": server.url})
        broker = RedisStreams.from_url(server.url)
        before, begun = _waiting(broker), time.perf_counter()
        latencies_s = asyncio.run(_step(settings, seconds))
        done, taken_s = before - (left := _waiting(broker)), time.perf_counter() - begun
        broker.close()
        if not left:
            raise ValueError("The backlog was used up: there was no load to be urgent in")
    settled = latencies_s[round(len(latencies_s) * _SETTLING_SHARE) :]
    run = Run(float(np.percentile(settled, 95)) * 1000, done / taken_s)
    say(f"step load, target {target_ms} ms: p95 {run.p95_ms:.0f} ms, backlog {run.backlog_per_s:,.0f}/s")
    return run


async def _step(settings: Settings, seconds: float) -> list[float]:
    """Jobs of high priority, one after the other, also after one that failed; seconds from submit to result."""
    chance = random.Random(7)
    latencies_s: list[float] = []

    async def one(client: AsyncClient, row: np.ndarray) -> float:
        begun = time.perf_counter()
        job = await client.submit(_MODEL, {"x": row}, priority="high")
        result = await job.result(timeout=_TIMEOUT_S)
        if not np.array_equal(result["y"], row * 2):
            raise ValueError("Wrong answers: not twice the inputs")
        return time.perf_counter() - begun

    async with AsyncClient.from_env(settings=settings) as client:
        rows, due, tasks = _rows(round(seconds * _RATE), seed=1), time.perf_counter(), []
        for index in range(len(rows)):
            due += chance.expovariate(_RATE)
            await asyncio.sleep(due - time.perf_counter())
            tasks.append(asyncio.create_task(one(client, rows[index : index + 1])))
        latencies_s = [await task for task in tasks]
    return latencies_s


def _queue_backlog(client: Client, jobs: int) -> None:
    rows = _rows(jobs, seed=2)
    client.submit_many(_MODEL, [{"x": rows[index : index + 1]} for index in range(jobs)], priority="low")


def _waiting(broker: RedisStreams) -> int:
    return sum(depth.jobs for depth in broker.depths(_MODEL) if depth.priority is Priority.LOW)


def _rows(jobs: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((jobs, 4), dtype=np.float32)


def _write_rowwise(root: Path) -> None:
    """Answers 2 x after a time that grows with the rows, and holds no GIL meanwhile."""
    write_package(
        root,
        _MODEL,
        f"""
        import time

        def build():
            def forward(inputs):
                time.sleep({_FIXED_S!r} + {_PER_ROW_S!r} * len(inputs["x"]))
                return {{"y": inputs["x"] * 2}}

            return forward
        """,
        max_batch_size=_MAX_ROWS,
    )
