"""A version in a worker: which jobs it accepts, and the size of its batches."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import Failure, JobHeader
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.package import ModelSpec, load_package
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array, encode
from penstock.workers.batch_run import BatchRun
from penstock.workers.job import ClaimedJob, inputs_of
from penstock.workers.runtime.instances import ProcessInstances
from penstock.workers.versions.tuner import AnsweredJob
from penstock.workers.versions.version import ServedVersion
from tests.packages import write_double
from tests.servers import wait_until
from tests.workers.doubles import cold_version


def claimed(inputs: dict[str, Array]) -> ClaimedJob:
    """A job of the model `double`, opened but not yet checked."""
    content, body = encode(inputs) if inputs else ((), b"")
    header = JobHeader(new_job_id("double"), "acme", "double", "normal", content)
    return ClaimedJob(Delivery("double", Priority.NORMAL, b"1-1", b""), header, body, 0, 0.0, 0.0, 0)


def test_only_a_job_with_the_shapes_of_the_one_before_skips_the_check(models_root: Path):
    """The first job is checked, later jobs with its shapes are checked with their batch; other shapes and missing
    inputs are refused."""
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
    model.queue.add(model.pending(jobs))
    batch = model.queue.batcher.next(0.0, device_idle=True)
    assert batch is not None
    assert batch.rows == min(rows, 3)


def test_observer_gets_the_answered_jobs(models_root: Path):
    """It gets plain values: the rows of the batch, and ids, inputs and outputs of the jobs that did not fail."""
    model = ServedVersion(load_package(write_double(models_root, "double")), InferenceConfig())
    jobs = [claimed({"x": np.full((1, 4), number, np.float32)}) for number in range(2)]
    for job in jobs:
        model.fit(job)
    model.queue.add(model.pending(jobs))
    batch = model.queue.batcher.next(0.0, device_idle=True)
    assert batch is not None
    run = BatchRun(model, batch)
    outputs = {"y": np.ones((1, 4), np.float32)}
    run.answers = [Failure("ModelError", "a failed job"), outputs]
    run.started, run.ended = 1.0, 3.0
    observed = run.observation
    assert (observed.rows, observed.seconds) == (2, 2.0)
    assert list(observed.answered(lambda _: True)) == [AnsweredJob(jobs[1].header.id, jobs[1].inputs, outputs)]


def test_lost_instances_are_counted_over_all_loads(models_root: Path):
    """The version is unloaded, and its next runtime begins at 0: the count goes on."""
    folder = write_double(models_root, "double")
    spec = yaml.safe_load((folder / "model.yaml").read_text())
    (folder / "model.yaml").write_text(yaml.safe_dump({**spec, "instances": 2}))
    version = ServedVersion(load_package(folder), InferenceConfig())
    for lost in (1, 2):
        runtime = version.runtime
        assert isinstance(runtime, ProcessInstances)
        try:
            runtime.load("cpu", 1)
            (victim, *_) = runtime._processes
            os.kill(victim.pid, signal.SIGKILL)
            wait_until(lambda: not victim.is_alive, 60, "it is dead")  # noqa: B023 - called before the next round
            # Each of them is asked: the one that died is noticed.
            for _ in range(2):
                runtime.run(runtime.prepare([{"x": np.zeros((1, 4), np.float32)}]))
            assert version.instances_lost == lost
        finally:
            version.unload()
        assert version.instances_lost == lost


MEMO_SPEC = {
    "name": "double",
    "version": "1",
    "format": "python",
    "entrypoint": "model:build",
    "inputs": [
        {"name": "x", "dtype": "float32", "shape": ["batch", "tokens"]},
        {"name": "mask", "dtype": "int64", "shape": ["batch", "tokens"], "optional": True},
    ],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 1]}],
    "batching": {"length_input": "x"},
}
DESCRIBED = st.fixed_dictionaries(
    {
        "x": st.tuples(st.sampled_from(["float32", "float64"]), st.integers(1, 3), st.integers(1, 3)),
        "mask": st.one_of(st.none(), st.tuples(st.just("int64"), st.integers(1, 3), st.integers(1, 3))),
        "turned": st.sampled_from([False, False, True]),
        "value": st.sampled_from([1.0, 1.0, 1.0, 3e38, np.nan, np.inf, -np.inf]),
    }
)


def described(drawn: dict[str, Any]) -> dict[str, Array]:
    """The inputs of a job with this description and this value in the last place of `x`. Some fit no signature."""
    named = {"x": drawn["x"], "mask": drawn["mask"]}
    inputs = {name: np.ones(each[1:], each[0]) for name, each in named.items() if each is not None}
    inputs["x"][-1, -1] = drawn["value"]
    return dict(reversed(inputs.items())) if drawn["turned"] else inputs


def memo_version() -> ServedVersion:
    return cold_version(ModelSpec.model_validate(MEMO_SPEC), 8)


def fitted(version: ServedVersion, job: ClaimedJob) -> object:
    """What a version says of a job until its forward: why it is refused, or how the batcher sees it."""
    try:
        version.fit(job)
        version.check_values(inputs_of([job]))
    except InvalidInput as error:
        return str(error)
    (item,) = version.pending([job])
    return job.rows, item.key, item.length, item.rows, item.nbytes, item.priority


@settings(max_examples=80, derandomize=True)
@given(pool=st.lists(DESCRIBED, min_size=1, max_size=6), drawn=st.lists(st.tuples(st.integers(0, 5), st.booleans())))
def test_a_version_that_remembers_descriptions_says_what_a_new_one_says(
    pool: list[dict[str, Any]], drawn: list[tuple[int, bool]]
):
    """Of each job, in any order; jobs share their description as one object, or have an equal one of their own."""
    version = memo_version()
    jobs = [claimed(described(each)) for each in pool]
    for index, is_shared in drawn:
        first = jobs[index % len(pool)]
        job = claimed(described(pool[index % len(pool)]))
        if is_shared:
            job.header = structs.replace(job.header, content=first.header.content)
        again = claimed(described(pool[index % len(pool)]))
        assert fitted(version, job) == (expected := fitted(memo_version(), again))
        if np.isfinite(again.inputs["x"]).all():
            assert version.knows(job) == isinstance(expected, tuple)


def test_jobs_of_one_key_have_the_same_key_object_and_pend_as_one_by_one():
    """Also those with other rows, and those that were described before a thousand others."""
    version = memo_version()
    jobs = []
    for extent in [*range(1, 600), *range(1, 20)]:
        job, other = (claimed({"x": np.ones((rows, extent), np.float32)}) for rows in (1, 2))
        version.fit(job)
        version.fit(other)
        first, second = version.pending([job, other])
        assert first.key is second.key
        assert (first.key, first.rows, second.rows) == (version._key_of(other), 1, 2)
        assert (first.length, second.length) == (extent, extent)
        jobs += [job, other]
    fresh = [memo_version().pending([job])[0] for job in jobs]
    assert [(each.key, each.length, each.rows, each.nbytes, each.job) for each in version.pending(jobs)] == [
        (each.key, each.length, each.rows, each.nbytes, each.job) for each in fresh
    ]
    assert len(version._fits) <= 256


@pytest.mark.parametrize(("hosts", "is_loaded"), [((), False), (("10.9.0.0/16",), True), (("10.8.0.0/16",), False)])
def test_a_text_server_must_be_named_by_the_operator(models_root: Path, hosts: tuple[str, ...], is_loaded: bool):
    """runtime_hosts: a package alone cannot choose whom a worker calls."""
    folder = models_root / "relay" / "1"
    folder.mkdir(parents=True)
    spec = {"name": "relay", "version": "1", "format": "generate", "generate": {"runtime_url": "http://10.9.8.7:1"}}
    (folder / "model.yaml").write_text(yaml.safe_dump(spec))
    version = ServedVersion(load_package(folder), InferenceConfig(runtime_hosts=hosts))
    if is_loaded:
        version.runtime.load("cpu", 1)
        assert version.runtime.content_hash
    else:
        with pytest.raises(ConfigurationError, match=r"relay/1: .*runtime_hosts does not name it"):
            version.runtime.load("cpu", 1)
