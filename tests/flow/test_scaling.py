"""SH-009, ES-063, CX-005, IN-045 to IN-048: a second worker takes half of the jobs, and the metrics add up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from penstock import Client, JobHandle
from penstock.registry.envelope import Keyring, open_result
from penstock.registry.errors import ModelError
from penstock.registry.queues import record_key
from tests.conftest import StartWorker
from tests.flow.conftest import Samples
from tests.packages import write_package, write_sleeper
from tests.servers import RedisServer, WorkerProcess, wait_until

SOURCE = """
def build():
    def forward(inputs):
        kind = int(inputs["x"][:, 0].min())
        if kind < 0:
            raise {-1: ValueError, -2: KeyError, -3: ZeroDivisionError}[kind]("on purpose")
        return {"y": inputs["x"] * 2}

    return forward
"""


def _row(number: float, other: float = 0) -> dict[str, np.ndarray]:
    return {"x": np.array([[number, other, 0, 0]], np.float32)}


def _answered(client: Client, model: str, count: int, first: int) -> list[JobHandle]:
    jobs = client.submit_many(model, [_row(first + number) for number in range(count)])
    for job in jobs:
        job.result(180)
    return jobs


def _workers_of(server: RedisServer, jobs: Sequence[JobHandle]) -> Counter[str]:
    with server.client() as redis:
        records = redis.mget([record_key(job.id) for job in jobs])
    return Counter(open_result(record[2:], Keyring.parse(None))[0].worker for record in records)


def test_second_worker_takes_half_of_the_jobs(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """A model whose forwards take time, on two workers: they share the jobs evenly."""
    write_sleeper(models_root, "asleep", forward_s=0.05, max_batch_size=4)
    start_worker(shared_redis, models_root)
    with Client(shared_redis.url) as client:
        assert len(_workers_of(shared_redis, _answered(client, "asleep", 160, 0))) == 1
        start_worker(shared_redis, models_root)

        def smaller_share(attempt: int) -> int:
            shares = _workers_of(shared_redis, _answered(client, "asleep", 160, 1000 * attempt))
            return min(shares.values()) if len(shares) == 2 else 0

        # A busy machine may hold one of them up for once; a worker that gets too little does so each time.
        assert any(smaller_share(attempt) >= 0.4 * 160 for attempt in (1, 2, 3))


def _total(workers: Sequence[WorkerProcess], sample: str, **labels: str) -> float:
    return sum(Samples(worker).total(sample, **labels) for worker in workers)


def test_counts_of_two_workers_equal_the_jobs_sent(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """Requests, latencies, batch sizes, outcomes and exception classes of both workers sum to what was sent."""
    write_package(models_root, "counted", SOURCE)
    buckets = {"PENSTOCK_INFERENCE_METRICS_BUCKETS": "0.01,0.1,1"}
    workers = [start_worker(shared_redis, models_root, environment=buckets) for _ in range(2)]
    with Client(shared_redis.url) as client:
        jobs = [client.submit("counted", _row(1 + number)) for number in range(300)]
        broken = [client.submit("counted", _row(-kind, each)) for kind in (1, 2, 3) for each in range(kind)]
        equal = [client.submit("counted", _row(777)) for _ in range(20)]
        assert [job.result(180)["y"][0, 0] for job in jobs + equal] == [*range(2, 602, 2), *[1554] * 20]
        for job in broken:
            with pytest.raises(ModelError, match="on purpose"):
                job.result(180)
    sent = len(jobs) + len(broken) + len(equal)
    # A worker counts a batch after its commit: its clients may have the results before.
    wait_until(lambda: _total(workers, "infer_requests_total", model="counted") >= sent, 30, "all jobs are counted")
    assert _total(workers, "penstock_jobs_total", model_name="counted") == sent
    assert _total(workers, "infer_latency_seconds_count", model="counted") == sent
    assert _total(workers, "infer_requests_total", model="counted") == sent
    exceptions: Counter[tuple[str, ...]] = Counter()
    for worker in workers:
        samples = Samples(worker)
        exceptions.update(samples.of("infer_exceptions_total", model="counted"))
        assert set(samples.of("infer_latency_seconds_bucket", model="counted")) == {
            ("0.01",),
            ("0.1",),
            ("1.0",),
            ("+Inf",),
        }
        sizes = samples.of("infer_batch_size_bucket", model="counted")
        assert sizes["16.0",] == sizes["+Inf",]
        assert samples.of("model_loaded") == {("counted", "1"): 1}
    assert exceptions == {("ValueError",): 1, ("KeyError",): 2, ("ZeroDivisionError",): 3}
