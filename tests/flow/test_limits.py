"""CX-016: a forward has a limit, and time spent waiting does not count towards it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from penstock.registry.errors import ForwardTimeout
from penstock.workers.process.crash_journal import journal_path
from tests.conftest import StartWorker
from tests.packages import write_package
from tests.servers import RedisServer

LIMIT_S = 3
EXIT_UNHEALTHY = 70
SOURCE = """
import time

def build():
    def forward(inputs):
        time.sleep(float(inputs["x"][0, 0]))
        return {"y": inputs["x"] * 2}

    return forward
"""


def x(seconds: float, number: float = 0) -> dict[str, object]:
    return {"x": np.array([[seconds, number, 0, 0]], np.float32)}


def test_a_forward_beyond_its_limit_ends_only_its_own_process(
    shared_redis: RedisServer, models_root: Path, start_worker: StartWorker
):
    """A worker whose forward hangs gives back the jobs that have not begun, and ends. The job that hangs has timed out.

    Jobs that wait for longer than a limit still run on the next worker.
    """
    write_package(models_root, "hanging", SOURCE, max_batch_size=1)
    environment = {
        "PENSTOCK_INFERENCE_TIMEOUT_SECONDS": str(LIMIT_S),
        # One machine has one home: the next worker finds the journals of the workers before it.
        "PENSTOCK_HOME": str(models_root / ".." / "home"),
    }
    worker = start_worker(shared_redis, models_root, environment=environment)
    with Client(shared_redis.url) as client:
        # In one call: the worker claims the others while it runs the first.
        hung, *waiting = client.submit_many("hanging", [x(60), *(x(0.1, number) for number in range(8))])
        assert worker.wait(180) == EXIT_UNHEALTHY
        next_one = start_worker(shared_redis, models_root, environment=environment)
        with pytest.raises(ForwardTimeout, match=r"^The forward took longer than its limit of 3 s"):
            hung.result(180)
        assert hung.status() == "failed"
        assert [job.result(180)["y"][0, 1] for job in waiting] == [2 * number for number in range(8)]
    assert next_one.child.poll() is None
    assert not journal_path(Path(environment["PENSTOCK_HOME"]), worker.pid).exists()
    text = worker.output.read_text()
    assert "worker gives up" in text
    assert "time.sleep(float(" in text
