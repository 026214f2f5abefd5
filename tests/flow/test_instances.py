"""A worker with two instances of a model: both are at work, one of them dies, and none outlives the worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from penstock import Client, Retry
from tests.benchmarks import meter
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

    def lost() -> dict[tuple[str, ...], float]:
        """Instances that were lost, by endpoint."""
        return Samples(worker).of("penstock_instances_lost_total", model_name="pair", model_version="1")

    with Client(redis_server.url) as client:
        assert wait_until(lost, 60, "the count is reported") == {("",): 0}
        jobs = [client.submit("pair", {"x": np.full((1, 4), number, np.float32)}) for number in (1, 2)]
        wait_until(lambda: begun(1) and begun(2), 60, "both jobs are on the model")
        (first,), (second,) = begun(1), begun(2)
        assert first != second
        assert worker.pid not in (first, second)
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: "jobs run again one by one" in worker.output.read_text(), 60, "the death was noticed")
        (gate / "open").touch()
        assert [job.result(180)["y"][0, 0] for job in jobs] == [2, 4]
        assert len(begun(1)) == 2
        assert begun(2) == {second}, "the other job ran once"
        # Its warm-up forwards are of number 0.
        wait_until(lambda: len(begun(0)) == 3, 60, "the instance that died is replaced")
        started = begun(0)
    assert worker.is_running
    wait_until(lambda: lost() == {("",): 1}, 60, "one instance counts as lost")
    wait_until(lambda: Samples(worker).total("penstock_jobs_total", outcome="completed") == 2, 60, "both count once")
    worker.terminate()
    worker.wait(180)
    wait_until(lambda: not any(map(_is_running, started)), 60, "no instance outlives its worker")


HANGS = """
import os, pathlib

HERE = pathlib.Path({folder!r})

def build():
    def forward(inputs):
        if inputs["x"][0, 0] == 1 and not (HERE / "hung").exists():
            (HERE / "hung").touch()
            (HERE / f"pid-{{os.getpid()}}").touch()
            sum(range(10 ** 15))
        return {{"y": inputs["x"] * 2}}

    return forward
"""


@pytest.mark.slow
def test_a_forward_that_hangs_in_an_instance_ends_the_worker_and_the_instance(
    redis_server: RedisServer, models_root: Path, tmp_path: Path, start_worker: StartWorker
):
    """As without instances: after its limit the process is replaced, and the next worker runs the job once more."""
    package = write_package(models_root, "hangs", HANGS.format(folder=str(tmp_path)), max_batch_size=1)
    amend(package, instances=2, timeout_s=2.0)
    worker = start_worker(redis_server, models_root)
    with Client(redis_server.url) as client:
        job = client.submit("hangs", {"x": np.ones((1, 4), np.float32)}, retry=Retry(attempts=2))
        (pid,) = wait_until(lambda: [int(path.name[4:]) for path in tmp_path.glob("pid-*")], 60, "the forward hangs")
        worker.wait(180)
        wait_until(lambda: not _is_running(pid), 60, "its instance is gone")
        start_worker(redis_server, models_root)
        assert job.result(180)["y"][0, 0] == 2


@pytest.mark.slow
def test_versions_with_instances_are_loaded_and_unloaded_beside_the_traffic(
    redis_server: RedisServer, models_root: Path, start_worker: StartWorker
):
    """A job names another version: its instances are loaded, in as many model threads as they need, and both answer."""
    for version, factor in (("1", 2), ("2", 3)):
        source = f"import os\ndef build():\n    return lambda inputs: {{'y': inputs['x'] * {factor}}}\n"
        amend(write_package(models_root, "twin", source, version=version), instances=1 + int(version))
    worker = start_worker(redis_server, models_root)
    with Client(redis_server.url) as client:
        for version, factor in (("2", 3), ("1", 2), ("2", 3)):
            jobs = [
                client.submit("twin", {"x": np.full((1, 4), number, np.float32)}, version=version)
                for number in range(1, 40)
            ]
            assert [job.result(180)["y"][0, 0] for job in jobs] == [factor * number for number in range(1, 40)]
    instances = [pid for pid in meter.tree(worker.pid)[1:] if "penstock.workers.runtime.instance" in command(pid)]
    assert len(instances) == 2 + 3
    worker.terminate()
    worker.wait(180)
    wait_until(lambda: not any(map(_is_running, instances)), 60, "no instance outlives its worker")


def command(pid: int) -> str:
    """The command line of a process."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
