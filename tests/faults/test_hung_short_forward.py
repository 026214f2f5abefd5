"""F9, on the I/O thread: a model with short forwards, which that thread runs itself, hangs once."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
import yaml

from penstock import Client
from penstock.registry.errors import ForwardTimeout
from tests.faults.conftest import OpenStage
from tests.packages import write_package
from tests.servers import wait_until

LIMIT_S = 1.0
WITHIN_S = 30.0
SHORT_FORWARDS = 40
"""At least so many one after another, until the worker takes them for short."""

_SOURCE = """
import json
import os
import threading
import time

import torch

from penstock.workers.versions import queue

# On a slow machine, too, each forward of this model is short.
queue._SHORT_S = 60.0


class Doubling(torch.nn.Module):
    def forward(self, x):
        first = float(x[0, 0])
        with open({log!r}, "a") as log:
            log.write(json.dumps([first, threading.current_thread().name, os.getpid()]) + "\\n")
        if first < 0:
            time.sleep(3600)
        return x * 2


def build():
    return Doubling()
"""


def _ends(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
def test_a_hung_forward_on_the_io_thread_ends_its_process_and_its_job_alone(open_stage: OpenStage):
    """The process is replaced, the client of the job gets a time-out, and the jobs behind it are answered."""
    stage = open_stage(model="short")
    package = write_package(stage.models_root, stage.model, _SOURCE.format(log=str(stage.forward_log)))
    spec = yaml.safe_load((package / "model.yaml").read_text())
    (package / "model.yaml").write_text(
        yaml.safe_dump(spec | {"format": "pytorch", "timeout_s": LIMIT_S, "max_level": 2})
    )
    stage.start_worker(is_supervised=True)

    def forwards() -> list[tuple[float, str, int]]:
        return [json.loads(line) for line in stage.forward_log.read_text().splitlines()]

    def answer(client: Client, number: float) -> float:
        return float(client.submit(stage.model, {"x": np.full((1, 4), number, np.float32)}).result(180)["y"][0, 0])

    with Client(stage.server.url, timeout_s=60) as client:

        def is_on_io_thread() -> bool:
            for number in range(1, SHORT_FORWARDS):
                assert answer(client, number) == 2 * number
            return forwards()[-1][1] == "drain"

        wait_until(is_on_io_thread, WITHIN_S, "the I/O thread runs the forwards")
        poison = client.submit(stage.model, {"x": np.full((1, 4), -7, np.float32)})
        wait_until(lambda: forwards()[-1][0] == -7, WITHIN_S, "the forward hangs")
        _, thread, pid = forwards()[-1]
        behind = [client.submit(stage.model, {"x": np.full((1, 4), number, np.float32)}) for number in (101, 102)]
        wait_until(lambda: _ends(pid), WITHIN_S, "the process that hangs is replaced")
        with pytest.raises(ForwardTimeout, match=f"The forward took longer than its limit of {LIMIT_S:g} s"):
            poison.result(180)
        assert [float(job.result(180)["y"][0, 0]) for job in behind] == [202, 204]
    hung = [(name, process) for number, name, process in forwards() if number == -7]
    assert (thread, len(hung)) == ("drain", 1), "a job that hung alone has no second forward"
    stage.close()
