"""CF-010, AR-038: the batches of a real worker follow `target_latency_ms`; the figures are the benchmark's."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from tests.conftest import StartWorker
from tests.packages import write_package
from tests.servers import RedisServer, WorkerProcess

_ROWWISE = """
import time

def build():
    def forward(inputs):
        time.sleep(0.002 * len(inputs["x"]))
        return {"y": inputs["x"] * 2}

    return forward
"""
_MAX_ROWS = 64
_URGENT = 60
_BETWEEN_S = 0.02


def _row(number: float) -> dict[str, np.ndarray]:
    return {"x": np.array([[number, 0, 0, 0]], np.float32)}


@pytest.mark.parametrize(("target_ms", "falls"), [(100, True), (1_000_000, False)])
def test_batches_fall_while_urgent_jobs_would_miss_the_target(
    target_ms: int,
    falls: bool,
    shared_redis: RedisServer,
    models_root: Path,
    start_worker: StartWorker,
    slot: str,
):
    """A full batch of the backlog takes 128 ms: with a target of 100 ms batches get smaller once urgent jobs have
    come for a while, and with one that is never missed they stay as they are."""
    write_package(models_root, slot, _ROWWISE, max_batch_size=_MAX_ROWS)
    with Client(shared_redis.url, models_root=models_root) as client:
        # Before the worker, and for 12 s of it: the backlog neither begins nor ends while urgent jobs come.
        client.submit_many(slot, [_row(number) for number in range(6_000)], priority="low")
        worker = start_worker(
            shared_redis,
            models_root,
            models=[slot],
            environment={"PENSTOCK_INFERENCE_BATCHING_TARGET_LATENCY_MS": str(target_ms)},
        )
        urgent = []
        for number in range(_URGENT):
            urgent.append(client.submit(slot, _row(-number), priority="high"))
            time.sleep(_BETWEEN_S)
        assert [job.result(180)["y"][0, 0] for job in urgent] == [-2.0 * number for number in range(_URGENT)]
    sizes = _sizes(worker)
    assert max(sizes) == _MAX_ROWS
    assert (min(sizes[2:]) <= _MAX_ROWS // 2) == falls


def _sizes(worker: WorkerProcess) -> list[int]:
    """Rows of its batches, oldest first; the first ones held what had come until then."""
    return [line["size"] for line in worker.logs() if line["msg"] == "batch committed"]
