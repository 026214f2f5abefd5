"""The cost of a version's batches, and the opt-in trace of a forward (AR-028, CX-046)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.registry.package import load_package
from penstock.safety.golden_store import GoldenStore
from penstock.workers.levels.profiler import Profiler, trace
from penstock.workers.runtime import Runtime, open_runtime
from penstock.workers.versions.tuner import AnsweredJob, BatchObservation
from tests.counting import lines_run
from tests.servers import ROOT, leave_out
from tests.workers.levels.fake_model import Clock, Rotation, answered_of, served

ONE = {"x": np.ones((1, 4), np.float32)}
TWO = {"x": np.ones((2, 4), np.float32)}


def loaded(folder: Path) -> Runtime:
    runtime = open_runtime(load_package(folder))
    runtime.load("cpu", 1)
    return runtime


@pytest.fixture
def rotation() -> Rotation:
    return Rotation(Clock(), {})


def test_profile_agrees_with_the_clock():
    """The seconds noted are those that the forwards took: one each on this clock."""
    clock = Clock()
    runtime = Rotation(clock, {})
    profiler = Profiler(runtime, None)
    for first in range(0, 20, 2):
        served(runtime, clock, [ONE, TWO], profiler.observe, first)
    profile = profiler.profile
    assert (profile.forwards, profile.rows) == (10, 30)
    assert (profile.seconds, profile.recent_s) == (10, 1)
    assert (profile.recent_rows, profile.rows_per_s) == (3, 3)


def test_moving_averages_follow_the_last_batches():
    """The averages follow the last ten batches or so; the sums hold all batches."""
    clock = Clock()
    runtime = Rotation(clock, {})
    profiler = Profiler(runtime, None)
    served(runtime, clock, [ONE], profiler.observe)
    assert profiler.profile.recent_s == 1
    for first in range(1, 61):
        served(runtime, clock, [ONE, ONE, ONE], profiler.observe, first * 3)
    assert profiler.profile.recent_rows == pytest.approx(3, abs=0.01)
    assert profiler.profile.seconds == 61


def test_goldens_are_the_answered_jobs():
    """A golden has the inputs and the outputs of a job that was answered."""
    profiler = Profiler(Rotation(Clock(), {}), GoldenStore())
    answered = [AnsweredJob("rotation.1", ONE, {"y": np.ones((1, 4), np.float32)})]
    profiler.observe(BatchObservation(rows=3, tokens=0, seconds=1.0, answered=answered_of(answered)))
    assert profiler.goldens is not None
    assert [(golden.job_id, golden.rows) for golden in profiler.goldens.goldens()] == [("rotation.1", 1)]


def test_observing_costs_little(rotation: Rotation):
    """Once the sample is full, a batch of 32 jobs is observed in a few lines of Python a job."""
    profiler = Profiler(rotation, GoldenStore())
    works: list = []
    for first in range(0, 6400, 64):
        served(rotation, rotation._clock, [ONE] * 64, profiler.observe, first)
    served(rotation, rotation._clock, [ONE] * 32, works.append, 6400)
    assert lines_run(lambda: profiler.observe(works[0])) <= 10 * 32


@pytest.fixture(scope="module")
def mlp() -> Iterator[Runtime]:
    runtime = loaded(ROOT / "models" / "mlp" / "1")
    yield runtime
    runtime.close()


def test_trace_names_the_operations(mlp: Runtime):
    """The table has the model's operations with their times."""
    batch = mlp.prepare([{"x": np.ones((8, 384), np.float32)}])
    table = trace(mlp.run, [batch, batch], is_cuda=False)
    assert table.startswith("2 batches, 16 rows, ")
    assert "aten::addmm" in table
    assert "Self CPU" in table


@pytest.mark.gpu
def test_trace_on_a_gpu_waits_for_the_device():
    """The times of CUDA operations need a wait for the device."""
    import torch

    if not torch.cuda.is_available():
        leave_out("needs a CUDA device")
    runtime = open_runtime(load_package(ROOT / "models" / "mlp" / "1"))
    runtime.load("cuda:0", 1)
    table = trace(runtime.run, [runtime.prepare([{"x": np.ones((8, 384), np.float32)}])], is_cuda=True)
    runtime.close()
    assert "Self CUDA" in table
