"""A job with a retry policy, from the client to its last forward, through a worker process."""

from __future__ import annotations

import doctest
from pathlib import Path

import pytest

from penstock import Client, Retry
from penstock.registry import envelope
from penstock.registry.errors import ModelError
from tests.conftest import StartWorker
from tests.flow.conftest import Samples
from tests.packages import write_package
from tests.servers import RedisServer

SOURCE = """
from collections import Counter

def build():
    forwards = Counter()

    def forward(inputs):
        number = float(inputs["x"][0, 0])
        forwards[number] += 1
        if number < 0 and forwards[number] <= -number:
            raise ValueError(f"forward {forwards[number]}")
        return {"y": inputs["x"] * 2}

    return forward
"""


def test_a_failing_job_is_answered_in_the_end(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """A job that fails twice succeeds at its third forward, after two pauses; one that fails three times is failed
    with its last error; one without a policy at its first. Failed forwards are counted.
    """
    write_package(models_root, "flaky", SOURCE, max_batch_size=1)
    worker = start_worker(shared_redis, models_root)
    policy = Retry(attempts=3, backoff_s=0.4, longest_s=0.4)
    with Client(shared_redis.url) as client:
        lucky = client.submit("flaky", {"x": [[-2, 0, 0, 0]]}, retry=policy)
        unlucky = client.submit("flaky", {"x": [[-3, 0, 0, 0]]}, retry=policy)
        plain = client.submit("flaky", {"x": [[-1, 0, 0, 0]]})
        with pytest.raises(ModelError, match="ValueError: forward 1"):
            plain.result(180)
        assert lucky.result(180)["y"][0, 0] == -4
        with pytest.raises(ModelError, match="ValueError: forward 3"):
            unlucky.result(180)
    samples = Samples(worker)
    assert samples.total("penstock_retried_total", model_name="flaky") == 4


def test_the_pauses_are_those_of_the_example():
    """What the docstring of Retry.pause_s shows is true."""
    results = doctest.testmod(envelope)
    assert (results.failed, results.attempted > 0) == (0, True)
