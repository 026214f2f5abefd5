"""A model in a worker: which jobs fit it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from registry.broker.base import Delivery
from registry.envelope import JobHeader
from registry.errors import InvalidInput
from registry.package import load_package
from registry.queues import Priority, new_job_id
from registry.settings import InferenceConfig
from registry.tensors import Array, encode
from tests.packages import write_double
from workers.job import ClaimedJob
from workers.served import ServedVersion


def claimed(inputs: dict[str, Array]) -> ClaimedJob:
    """A job of the model `double`, opened but not yet checked."""
    content, _ = encode(inputs) if inputs else ((), b"")
    header = JobHeader(new_job_id("double"), "acme", "double", "normal", content)
    return ClaimedJob(Delivery("double", Priority.NORMAL, b"1-1", b""), header, inputs, 0, 0.0, 0.0, 0)


def test_only_a_job_shaped_like_the_one_before_skips_the_check(models_root: Path):
    """The first is checked, its likes are counted like it, and whatever differs, also nothing at all, is refused."""
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
