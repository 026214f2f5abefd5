"""A pipeline in a real worker: one job for its client and for the broker, whatever the number of its steps."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock import Client, InvalidInput, ModelError
from penstock.registry.queues import MODELS_KEY
from tests.conftest import StartWorker
from tests.pipelines import write_chain, write_pipeline, write_step
from tests.servers import RedisServer

RAISING = """
def build():
    def forward(inputs):
        if (inputs["x"][:, 0] < 0).any():
            raise ValueError("a negative row")
        return {"y": inputs["x"] * 10}
    return forward
"""


def rows(number: float, count: int = 1) -> dict[str, np.ndarray]:
    return {"x": np.full((count, 4), number, np.float32)}


def test_pipeline_is_one_job_in_the_broker(redis_server: RedisServer, models_root: Path, start_worker: StartWorker):
    """Two steps, one record, one model: the steps are no models of their own, and leave nothing in the broker."""
    write_chain(models_root)
    start_worker(redis_server, models_root)
    with Client(redis_server.url) as client, redis_server.client() as redis:
        job = client.submit("chain", rows(3.0, 2))
        assert job.result(180)["y"].tolist() == [[12.0] * 4] * 2
        records = [key.decode() for key in redis.keys("*:job:*")]
        assert records == [f"{{chain}}:job:{job.id.removeprefix('chain.')}"]
        assert redis.smembers(MODELS_KEY) == {b"chain"}
        info = job.info()
        assert (info.version, info.attempt) == ("1", 1)


def test_one_bad_job_fails_alone_and_names_its_step(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """Jobs of one to three rows share forwards; the message has the step, the error and the line."""
    folder = write_pipeline(models_root)
    write_step(folder, "first")
    write_step(folder, "second", RAISING)
    start_worker(redis_server, models_root)
    with Client(redis_server.url) as client:
        jobs = client.submit_many(
            "chain", [rows(number if number != 5 else -5, 1 + number % 3) for number in range(12)]
        )
        for number, job in enumerate(jobs):
            if number == 5:
                with pytest.raises(ModelError) as failed:
                    job.result(180)
                assert str(failed.value) == "step second: ValueError: a negative row (model.py, line 5, in forward)"
            else:
                assert job.result(180)["y"].tolist() == [[number * 20.0] * 4] * (1 + number % 3)
        with pytest.raises(InvalidInput, match=r"^x: shape \(1, 3\)\. Expected \(batch, 4\)"):
            client.submit("chain", {"x": np.zeros((1, 3), np.float32)})
