"""SH-001: more urgent jobs overtake, and no job starves."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock import Client
from tests.conftest import StartWorker
from tests.flow.conftest import Fleet
from tests.packages import recorded_forwards, write_sleeper
from tests.servers import RedisServer


def _row(number: float) -> dict[str, np.ndarray]:
    return {"x": np.array([[number, 0, 0, 0]], np.float32)}


def test_high_job_overtakes_a_thousand_low_ones(client: Client, fleet: Fleet):
    """A high job that comes last runs within the batches that had been claimed before it, and critical before high."""
    fleet.worker.freeze()
    try:
        low = client.submit_many("recorder", [_row(20_000 + number) for number in range(1000)], priority="low")
        high = client.submit("recorder", _row(30_000), priority="high")
        critical = client.submit("recorder", _row(40_000), priority="critical")
    finally:
        fleet.worker.thaw()
    assert high.result(180)["y"][0, 0] == 60_000
    assert critical.result(180)["y"][0, 0] == 80_000
    assert [job.result(180)["y"][0, 0] for job in low] == [2 * (20_000 + number) for number in range(1000)]
    order = [number for rows in recorded_forwards(fleet.forward_log) for number in rows if 20_000 <= number <= 40_000]
    # What the worker had asked for before it froze: two batches of 16 for each of the four queues at most.
    assert order.index(40_000) <= order.index(30_000) <= 2 * 16
    assert len(order) == 1002


def test_low_job_is_not_starved_by_a_flood_of_high_ones(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """With high jobs always waiting, low ones get their share of the batches once they have aged."""
    write_sleeper(models_root, "flooded", forward_s=0.02, max_batch_size=4)
    with Client(shared_redis.url, models_root=models_root) as client:
        high = client.submit_many("flooded", [_row(number) for number in range(3000)], priority="high")
        low = client.submit_many("flooded", [_row(-1 - number) for number in range(4)], priority="low")
        start_worker(shared_redis, models_root, environment={"PENSTOCK_INFERENCE_QUEUE_AGEING_S": "0.1"})
        for job in low:
            job.result(180)
        # The others last 15 s: the test sees a flood, also where it is slow to look.
        assert {job.status() for job in high[-200:]} == {"queued"}
