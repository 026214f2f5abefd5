"""CX-016: a forward has a limit, and time spent waiting does not count towards it."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from producers import Client
from registry.errors import ForwardTimeout
from tests.conftest import StartWorker
from tests.flow.conftest import snapshot
from tests.packages import write_package
from tests.servers import RedisServer

LIMIT_S = 0.4
SOURCE = """
import time

def build():
    def forward(inputs):
        time.sleep(float(inputs["x"][0, 0]))
        return {"y": inputs["x"] * 2}

    return forward
"""


def test_forward_beyond_its_limit_fails_alone(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """A forward that hangs ends its job with ForwardTimeout at the limit; those who wait longer than that still run."""
    write_package(models_root, "hanging", SOURCE, max_batch_size=1)
    worker = start_worker(shared_redis, models_root, environment={"PENSTOCK_INFERENCE_TIMEOUT_SECONDS": str(LIMIT_S)})
    with Client(shared_redis.url) as client:
        begun = time.monotonic()
        hung = client.submit("hanging", {"x": np.array([[8, 0, 0, 0]], np.float32)})
        waiting = [client.submit("hanging", {"x": np.array([[0.1, number, 0, 0]], np.float32)}) for number in range(8)]
        with pytest.raises(ForwardTimeout, match=r"The forward took longer than its limit of 0\.4 s"):
            hung.result(10)
        assert LIMIT_S <= time.monotonic() - begun < LIMIT_S + 1
        assert [job.result(10)["y"][0, 1] for job in waiting] == [2 * number for number in range(8)]
        assert time.monotonic() - begun < 5
    assert snapshot(worker, "hanging")["outcomes"] == {"failed": 1, "completed": 8}
    assert worker.report()["ready"]
