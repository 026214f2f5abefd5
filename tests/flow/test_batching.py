"""SH-003, AR-054, CF-006 to CF-009, IN-002, IN-052, CX-031, AR-001: how jobs become forwards, counted in the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock import Client, JobHandle
from penstock.registry.broker.redis_streams import RedisStreams
from tests.conftest import StartWorker
from tests.flow.conftest import Fleet, Samples, amend, snapshot
from tests.packages import recorded_forwards, write_package, write_recorder, write_sleeper
from tests.servers import RedisServer, WorkerProcess, wait_until


def _rows(numbers: Sequence[float]) -> dict[str, np.ndarray]:
    return {"x": np.array([[number, 0, 0, 0] for number in numbers], np.float32)}


def _answers(jobs: Sequence[JobHandle]) -> list[float]:
    return [float(job.result(180)["y"][0, 0]) for job in jobs]


def _forwards(forward_log: Path, first: float = 1) -> list[list[float]]:
    """What the model saw, warm-up left out."""
    return [rows for rows in recorded_forwards(forward_log) if rows[0] >= first]


def _flood(client: Client, worker: WorkerProcess, model: str, count: int, first: int = 1) -> list[JobHandle]:
    """All jobs wait before the worker sees the first, so that batches do not depend on who is faster."""
    worker.freeze()
    try:
        return client.submit_many(model, [_rows([first + number]) for number in range(count)])
    finally:
        worker.thaw()


def test_many_jobs_become_few_forwards(client: Client, fleet: Fleet):
    """Under load the batch histogram rises above one, and reaches the model's limit of 16 but never more."""
    before = Samples(fleet.worker)
    jobs = _flood(client, fleet.worker, "recorder", 160, first=50_001)
    assert _answers(jobs) == [2 * (50_001 + number) for number in range(160)]
    forwards = [rows for rows in _forwards(fleet.forward_log) if 50_001 <= rows[0] <= 50_160]
    assert sum(map(len, forwards)) == 160
    assert max(map(len, forwards)) == 16
    assert len(forwards) <= 20

    def counted(sample: str) -> float:
        return Samples(fleet.worker).total(sample, model="recorder") - before.total(sample, model="recorder")

    # A worker counts a batch after its commit: its clients may have the results before.
    wait_until(lambda: counted("infer_batch_size_sum") >= 160, 30, "all jobs are counted")
    assert (counted("infer_batch_size_sum"), counted("infer_batch_size_count")) == (160, len(forwards))


def test_batches_save_forwards(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """A forward of fixed cost: with batches of 16 the same jobs need at most a sixth of the forwards."""
    limits = {"one-by-one": 1, "batched": 16}
    for model, limit in limits.items():
        write_sleeper(models_root, model, forward_s=0.01, max_batch_size=limit)
    worker = start_worker(shared_redis, models_root)
    with Client(shared_redis.url) as client:
        for model in limits:
            _answers(_flood(client, worker, model, 128))

    def are_counted() -> bool:
        samples = Samples(worker)
        return all(samples.total("infer_batch_size_sum", model=model) >= 128 for model in limits)

    wait_until(are_counted, 30, "all jobs are counted")
    samples = Samples(worker)
    forwards = {model: samples.total("infer_batch_size_count", model=model) for model in limits}
    assert forwards["one-by-one"] == 128
    assert forwards["batched"] <= 128 / 6


def test_each_model_has_limits_of_its_own(shared_redis: RedisServer, models_root: Path, tmp_path: Path, start_worker):
    """Two models with other limits on one worker: under load each reaches its own, and never passes it."""
    write_recorder(models_root, tmp_path / "four", "four", forward_s=0.005)
    amend(models_root / "four" / "1", batching={"max_batch_size": 4})
    write_recorder(models_root, tmp_path / "default", "default", forward_s=0.005)
    amend(models_root / "default" / "1", batching={})
    worker = start_worker(shared_redis, models_root, environment={"PENSTOCK_INFERENCE_BATCHING_MAX_BATCH_SIZE": "10"})
    with Client(shared_redis.url) as client:
        worker.freeze()
        jobs = {
            model: client.submit_many(model, [_rows([1 + number]) for number in range(60)])
            for model in ("four", "default")
        }
        worker.thaw()
        for handles in jobs.values():
            assert _answers(handles) == [2 * (1 + number) for number in range(60)]
    for model, limit in (("four", 4), ("default", 10)):
        sizes = [len(rows) for rows in _forwards(tmp_path / model)]
        assert max(sizes) == limit, model
        assert sum(sizes) == 60
        assert max(int(size) for size in snapshot(worker, model)["batch_sizes"]) == limit


@pytest.mark.parametrize("switch", ["PENSTOCK_INFERENCE_BATCHING_ENABLED", "PENSTOCK_INFERENCE_ENABLED"])
def test_without_batching_every_forward_has_one_row(
    switch: str, shared_redis: RedisServer, models_root: Path, tmp_path: Path, start_worker: StartWorker
):
    """Switched off, alone or with everything else: one row a forward, also for jobs of several rows; same answers."""
    forward_log = tmp_path / "forward_log"
    write_recorder(models_root, forward_log, "unbatched")
    worker = start_worker(shared_redis, models_root, environment={switch: "false"})
    with Client(shared_redis.url) as client:
        jobs = _flood(client, worker, "unbatched", 40)
        wide = client.submit("unbatched", _rows([101, 102, 103]))
        assert _answers(jobs) == [2 * (1 + number) for number in range(40)]
        np.testing.assert_array_equal(wide.result(180)["y"], _rows([202, 204, 206])["x"])
    assert sorted(_forwards(forward_log)) == [[float(number)] for number in (*range(1, 41), 101, 102, 103)]


def test_the_model_runs_as_it_was_built(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """The runtime neither wraps nor rebuilds the model: one build, and every forward is the object that it returned."""
    write_package(
        models_root,
        "itself",
        """
        import sys

        builds = []

        class Model:
            def __call__(self, inputs):
                is_whole = sys._getframe(0).f_code is Model.__call__.__code__ and builds == [id(self)]
                return {"y": inputs["x"] * (2 if is_whole else -1)}

        def build():
            model = Model()
            builds.append(id(model))
            return model
        """,
    )
    start_worker(shared_redis, models_root)
    with Client(shared_redis.url) as client:
        assert _answers([client.submit("itself", _rows([number])) for number in range(1, 20)]) == list(range(2, 40, 2))


def test_worker_holds_no_more_than_its_limit(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """max_queue_depth bounds the jobs claimed by one worker at any moment, however many wait."""
    write_sleeper(models_root, "bounded", forward_s=0.01, max_batch_size=16)
    worker = start_worker(shared_redis, models_root, environment={"PENSTOCK_INFERENCE_BATCHING_MAX_QUEUE_DEPTH": "8"})
    held = []
    broker = RedisStreams.from_url(shared_redis.url)
    with Client(shared_redis.url) as client:
        jobs = _flood(client, worker, "bounded", 300)
        while depth := sum(depth.jobs for depth in broker.depths("bounded")):
            held.append(sum(depth.running for depth in broker.depths("bounded")))
            assert depth <= 300
        assert len(_answers(jobs)) == 300
    broker.close()
    assert 4 < max(held) <= 8


def test_worker_holds_no_more_bytes_than_its_credit(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """max_queue_bytes bounds the bytes claimed by one worker: beyond it a last job, and one of a lower priority."""
    package = write_sleeper(models_root, "heavy", forward_s=0.01, max_batch_size=16)
    tensor = {"dtype": "float32", "shape": ["batch", 1 << 18]}
    amend(package, inputs=[{"name": "x", **tensor}], outputs=[{"name": "y", **tensor}])
    environment = {"PENSTOCK_INFERENCE_BATCHING_MAX_QUEUE_BYTES": str(4 << 20)}
    worker = start_worker(shared_redis, models_root, environment=environment)
    held = []
    with Client(shared_redis.url) as client, closing(RedisStreams.from_url(shared_redis.url)) as broker:
        inputs = [{"x": np.full((1, 1 << 18), number, np.float32)} for number in range(40)]
        worker.freeze()
        jobs = client.submit_many("heavy", inputs)
        worker.thaw()
        while sum(depth.jobs for depth in broker.depths("heavy")):
            held.append(sum(depth.running for depth in broker.depths("heavy")))
        assert [float(job.result(180)["y"][0, 0]) for job in jobs] == [2.0 * number for number in range(40)]
    assert 1 < max(held) <= 6


def test_lone_request_is_not_kept_waiting(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """An idle worker answers without waiting for company, which a job may wait for longer than this test runs."""
    write_sleeper(models_root, "lone", forward_s=0.0)
    start_worker(shared_redis, models_root, environment={"PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS": "600000"})
    with Client(shared_redis.url) as client:
        for number in range(20):
            assert client.submit("lone", _rows([number])).result(180)["y"][0, 0] == 2 * number


def test_concurrency_of_a_model_is_its_limit(
    shared_redis: RedisServer, models_root: Path, tmp_path: Path, start_worker: StartWorker
):
    """A model with concurrency 2 has two forwards at work under load, and never three."""
    forward_log = tmp_path / "forward_log"
    package = write_package(
        models_root,
        "pair",
        f"""
        import json, os, threading, time

        forward_log = os.open({str(forward_log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        running, lock = [], threading.Lock()

        def build():
            def forward(inputs):
                with lock:
                    running.append(1)
                    os.write(forward_log, (json.dumps(len(running)) + "\\n").encode())
                time.sleep(0.02)
                with lock:
                    running.pop()
                return {{"y": inputs["x"] * 2}}

            return forward
        """,
        max_batch_size=2,
    )
    amend(package, concurrency=2)
    worker = start_worker(shared_redis, models_root)
    with Client(shared_redis.url) as client:
        assert len(_answers(_flood(client, worker, "pair", 40))) == 40
    assert max(json.loads(line) for line in forward_log.read_text().splitlines()) == 2


def test_equal_jobs_of_a_tenant_share_one_forward(client: Client, fleet: Fleet):
    """Single flight: equal inputs in flight together run once for each tenant, and every job gets its own result."""
    before = Samples(fleet.worker)
    fleet.worker.freeze()
    try:
        jobs = [client.submit("slow", _rows([60_000]), tenant="acme") for _ in range(18)]
        jobs += [client.submit("slow", _rows([60_000]), tenant="globex") for _ in range(6)]
    finally:
        fleet.worker.thaw()
    assert _answers(jobs) == [120_000] * 24
    assert len({job.id for job in jobs}) == 24
    assert [number for rows in _forwards(fleet.forward_log) for number in rows].count(60_000) == 2
    after = Samples(fleet.worker)
    assert after.total("penstock_single_flight_total") - before.total("penstock_single_flight_total") == 22
    # A forward has no more jobs than the model's limit, however many it answers.
    sizes = after.of("infer_batch_size_bucket", model="slow")
    assert sizes["16.0",] == sizes["+Inf",]
