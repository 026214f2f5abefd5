"""A worker with two instances of a model: both are at work, one of them dies, and none outlives the worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np

from penstock import Client
from tests.conftest import StartWorker
from tests.flow.conftest import Samples, amend
from tests.packages import write_package
from tests.servers import RedisServer, wait_until

SOURCE = """
import os, pathlib, time

HERE = pathlib.Path({folder!r})

def build():
    def forward(inputs):
        number = int(inputs["x"][0, 0])
        (HERE / f"{{number}}-{{os.getpid()}}").touch()
        while number and not (HERE / "open").exists():
            time.sleep(0.01)
        return {{"y": inputs["x"] * 2}}

    return forward
"""


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_job_survives_the_death_of_its_instance(
    redis_server: RedisServer, models_root: Path, tmp_path: Path, start_worker: StartWorker
):
    """Two jobs are on the model in two processes. One process is killed: its job is run again by another instance, the
    other job is not disturbed, and the worker goes on. When it stops, its instances are gone."""
    gate = tmp_path / "gate"
    gate.mkdir()
    package = write_package(models_root, "pair", SOURCE.format(folder=str(gate)), max_batch_size=1)
    amend(package, instances=2)
    worker = start_worker(redis_server, models_root)

    def begun(number: int) -> set[int]:
        """The processes that began this job."""
        return {int(path.name.partition("-")[2]) for path in gate.glob(f"{number}-*")}

    with Client(redis_server.url) as client:
        jobs = [client.submit("pair", {"x": np.full((1, 4), number, np.float32)}) for number in (1, 2)]
        wait_until(lambda: begun(1) and begun(2), 60, "both jobs are on the model")
        (first,), (second,) = begun(1), begun(2)
        assert first != second
        assert worker.pid not in (first, second)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "jobs run again one by one" in worker.output.read_text(), 60, "the death was noticed")
        (gate / "open").touch()
        assert [job.result(60)["y"][0, 0] for job in jobs] == [2, 4]
        assert len(begun(1)) == 2
        assert begun(2) == {second}, "the other job ran once"
        # Its warm-up forwards are of number 0.
        wait_until(lambda: len(begun(0)) == 3, 60, "the instance that died is replaced")
        started = begun(0)
    assert worker.is_running
    wait_until(lambda: Samples(worker).total("penstock_jobs_total", outcome="completed") == 2, 60, "both count once")
    worker.terminate()
    worker.wait(60)
    wait_until(lambda: not any(map(_is_running, started)), 60, "no instance outlives its worker")
