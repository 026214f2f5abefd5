"""A version in a worker: which jobs it accepts, and the size of its batches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.errors import InvalidInput
from penstock.registry.package import load_package
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.settings import InferenceConfig
from penstock.registry.tensors import Array, encode
from penstock.workers.batch_run import BatchRun
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.tuner import AnsweredJob
from penstock.workers.versions.version import ServedVersion
from tests.packages import write_double


def claimed(inputs: dict[str, Array]) -> ClaimedJob:
    """A job of the model `double`, opened but not yet checked."""
    content, _ = encode(inputs) if inputs else ((), b"")
    header = JobHeader(new_job_id("double"), "acme", "double", "normal", content)
    return ClaimedJob(Delivery("double", Priority.NORMAL, b"1-1", b""), header, inputs, 0, 0.0, 0.0, 0)


def test_only_a_job_with_the_shapes_of_the_one_before_skips_the_check(models_root: Path):
    """The first job is checked, later jobs with its shapes are not; other shapes and missing inputs are refused."""
    model = ServedVersion(load_package(write_double(models_root, "double")), InferenceConfig())
    with pytest.raises(InvalidInput, match="Missing required"):
        model.fit(claimed({}))
    for rows in (3, 3, 1):
        job = claimed({"x": np.zeros((rows, 4), np.float32)})
        model.fit(job)
        assert job.rows == rows
    for wrong in ({}, {"x": np.zeros((1, 5), np.float32)}, {"x": np.zeros((1, 4), np.float64)}):
        with pytest.raises(InvalidInput):
            model.fit(claimed(wrong))


@pytest.mark.parametrize(
    ("config", "package", "rows"),
    [
        ({"max_level": 0}, {}, 1),
        ({"max_level": 1}, {}, 1),
        ({}, {}, 32),
        ({"max_level": 3}, {}, 32),
        ({"max_level": 4}, {}, 32),
        ({"max_level": 3}, {"max_level": 1}, 1),
        ({"max_level": 1}, {"max_level": 3}, 1),
        ({"batching": {"enabled": False}}, {}, 1),
        ({"enabled": False}, {}, 1),
        ({"batching": {"max_batch_size": 8}}, {}, 8),
        ({"batching": {"max_batch_size": 8}}, {"batching": {"max_batch_size": 4}}, 4),
        ({"batching": {"max_batch_size": 8}, "max_level": 0}, {"batching": {"max_batch_size": 4}}, 1),
    ],
)
def test_jobs_share_a_forward_from_level_2_on(
    models_root: Path, config: dict[str, object], package: dict[str, object], rows: int
):
    """At the levels 0 and 1 each job has its own forward; the lower level of setting and package counts. From
    level 2 on the batch size is the package's, else the setting's, else 32 (CF-004)."""
    folder = write_double(models_root, "double")
    spec = yaml.safe_load((folder / "model.yaml").read_text())
    (folder / "model.yaml").write_text(yaml.safe_dump(spec | {"batching": {}} | package))
    model = ServedVersion(load_package(folder), InferenceConfig.model_validate(config))
    assert (model.queue.limits.max_rows, model.queue.max_rows) == (rows, rows)
    jobs = [claimed({"x": np.full((1, 4), number, np.float32)}) for number in range(3)]
    for job in jobs:
        model.fit(job)
    model.queue.add([model.pending(job) for job in jobs])
    batch = model.queue.batcher.next(0.0, device_idle=True)
    assert batch is not None
    assert batch.rows == min(rows, 3)


def test_observer_gets_the_answered_jobs(models_root: Path):
    """It gets plain values: the rows of the batch, and ids, inputs and outputs of the jobs that did not fail."""
    model = ServedVersion(load_package(write_double(models_root, "double")), InferenceConfig())
    jobs = [claimed({"x": np.full((1, 4), number, np.float32)}) for number in range(2)]
    for job in jobs:
        model.fit(job)
    model.queue.add([model.pending(job) for job in jobs])
    batch = model.queue.batcher.next(0.0, device_idle=True)
    assert batch is not None
    run = BatchRun(model, batch)
    outputs = {"y": np.ones((1, 4), np.float32)}
    run.answers = [Failure("ModelError", "a failed job"), outputs]
    run.started, run.ended = 1.0, 3.0
    observed = run.observation
    assert (observed.rows, observed.seconds) == (2, 2.0)
    assert list(observed.answered) == [AnsweredJob(jobs[1].header.id, jobs[1].inputs, outputs)]
