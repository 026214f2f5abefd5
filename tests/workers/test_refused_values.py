"""NaN and infinity in jobs of foreign clients: each such job is refused, and its neighbours are answered.

A worker that knows the description of a job looks at the values of the whole batch; see ServedVersion.check_values.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from penstock.registry.broker.base import Publication, State
from penstock.registry.envelope import JobHeader, Options, Retry, open_result, seal
from penstock.registry.package.signature import Signature
from penstock.registry.queues import Priority, new_job_id
from penstock.registry.tensors import Array, encode
from tests.packages import write_double, write_package
from tests.workers.stepped import LIMITS, UNSIGNED, SteppedHarness, SteppedWorker, open_harness

BAD = (math.nan, -math.nan, math.inf, -math.inf)
REFUSAL = "x: contains NaN or infinity. Expected finite numbers"
_HOW: tuple[dict[str, Any], ...] = (
    {},
    {"tenant": "other"},
    {"options": Options(retry=Retry(attempts=2, backoff_s=1.0))},
    {"options": Options(outputs=("y",))},
    {"version": "1"},
    {"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"},
)
VALUE = st.one_of(st.sampled_from(BAD), st.sampled_from([0.0, 1.0, -3e38, 1e-45]), st.floats(-9, 9, width=32))
ROWS = st.lists(st.one_of(st.floats(-9, 9, width=32), VALUE), min_size=1, max_size=3)
"""A number for each row of a job."""


class Foreign(NamedTuple):
    """A job as a client publishes it that does not look at values."""

    job_id: str
    header: dict[str, Any]
    inputs: dict[str, Array]

    def publication(self) -> Publication:
        content, body = encode(self.inputs)
        header = structs.replace(JobHeader(self.job_id, "acme", "double", "normal", content), **self.header)
        return Publication(self.job_id, Priority.NORMAL, seal("job", header, body, UNSIGNED), header.tenant)


def rows_of(numbers: Sequence[float]) -> Array:
    """Each number stands at another place of its row."""
    rows = np.ones((len(numbers), 4), np.float32)
    for row, number in enumerate(numbers):
        rows[row, row % 4] = number
    return rows


def foreign(*numbers: float, **header: Any) -> Foreign:
    return Foreign(new_job_id("double"), header, {"x": rows_of(numbers)})


def publish(harness: SteppedHarness, jobs: Sequence[Foreign]) -> None:
    harness.broker.publish("double", [job.publication() for job in jobs], LIMITS)


def finish(harness: SteppedHarness, worker: SteppedWorker) -> None:
    """All forwards, also those after pauses."""
    for _ in range(3):
        worker.forwards()
        harness.pass_time(3.0)


def held(worker: SteppedWorker) -> tuple[int, int, int]:
    """Jobs that the worker leases, and those in the memory of the model and on it."""
    parts = worker.drain.parts
    version = parts.lifecycle.models["double"].versions["1"]
    return len(parts.leased), version.queue.in_memory, version.queue.in_flight


def facts(harness: SteppedHarness, job: Foreign) -> tuple[object, ...]:
    """What a client sees of a job, but for the figures of the batch in which it ran."""
    record = harness.job_record(job.job_id)
    header, body = open_result(record.result, UNSIGNED)
    is_refused = header.error is not None and header.error.code == "InputRefused"
    batch = (header.batch_size, header.timings) if is_refused else ()
    return record.state, header.error, header.version, header.content, header.content_hash, header.attempt, body, batch


@pytest.fixture
def harness(models_root: Path) -> Iterator[SteppedHarness]:
    write_double(models_root)
    yield from open_harness(models_root)


@settings(max_examples=25, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(drawn=st.lists(st.tuples(ROWS, st.sampled_from(_HOW)), min_size=1, max_size=10), shares=st.booleans())
def test_jobs_of_a_known_description_end_as_those_that_are_checked_one_by_one(
    drawn: list[tuple[list[float], dict[str, Any]]], shares: bool, tmp_path_factory: pytest.TempPathFactory
):
    """Random mixes of good and bad jobs in the batches of one worker, also while equal jobs share answers, and each job
    alone in a worker that knows no description."""
    root = tmp_path_factory.mktemp("models")
    write_double(root)
    sections = {"batching": {"single_flight": shares}, "cache": {"enabled": shares}}
    jobs = [foreign(*numbers, **how) for numbers, how in drawn]
    with_all, one_by_one = (SteppedHarness(root, **sections) for _ in range(2))
    worker = with_all.start_worker()
    known = [foreign(*[1.0] * rows) for rows in (1, 2, 3)]
    for each in known:
        publish(with_all, [each])
        finish(with_all, worker)
    publish(with_all, jobs)
    finish(with_all, worker)
    ended: Counter[tuple[str, State, str]] = Counter()
    for job in jobs:
        alone = one_by_one.start_worker()
        publish(one_by_one, [job])
        finish(one_by_one, alone)
        ended.update(alone.notes.ends)
        one_by_one.suspend(alone)
    assert [facts(with_all, job) for job in jobs] == [facts(one_by_one, job) for job in jobs]
    assert Counter(worker.notes.ends) - Counter((each.job_id, State.COMPLETED, "") for each in known) == ended
    assert held(worker) == (0, 0, 0)
    for harness in (with_all, one_by_one):
        for end in harness.ends:
            end.close()


@pytest.mark.parametrize("bad", BAD)
def test_only_the_bad_job_of_a_batch_is_refused(harness: SteppedHarness, bad: float):
    """It has neither a place in a forward nor a try of its retry policy, and no figures of a batch."""
    worker = harness.start_worker()
    publish(harness, [foreign(1.0)])
    worker.forwards()
    jobs = [foreign(2.0), foreign(bad, options=Options(retry=Retry(attempts=3))), foreign(3.0)]
    publish(harness, jobs)
    assert worker.forwards() == [[job.job_id for job in jobs]]
    assert [harness.answer(job.job_id) for job in jobs] == [4.0, "InputRefused", 6.0]
    header, _ = open_result(harness.job_record(jobs[1].job_id).result, UNSIGNED)
    assert header.error is not None
    assert (header.error.message, header.version, header.batch_size) == (REFUSAL, "", 0)
    assert (worker.notes.retries, worker.counted("penstock_retried")) == ([], 0)
    assert held(worker) == (0, 0, 0)


def test_a_joined_batch_is_looked_at_once(harness: SteppedHarness, monkeypatch: pytest.MonkeyPatch):
    """Not each of its jobs, and no job that is checked when it comes; as long as all of its values are finite."""
    looked_at: list[int] = []
    check = Signature.check_finite

    def counting(self: Signature, arrays: dict[str, Array]) -> None:
        looked_at.append(len(arrays["x"]))
        check(self, arrays)

    monkeypatch.setattr(Signature, "check_finite", counting)
    worker = harness.start_worker()
    publish(harness, [foreign(1.0)])
    worker.forwards()
    looked_at.clear()
    publish(harness, [foreign(2.0 + number) for number in range(12)])
    worker.forwards()
    assert looked_at == [12]


@pytest.mark.parametrize("bad", BAD)
def test_a_bad_job_of_a_streaming_model_is_refused(models_root: Path, bad: float):
    """Before its stream begins, so that it sends no chunk."""
    source = """
        def build():
            def stream(inputs, context):
                yield {"y": inputs["x"]}
                return {"y": inputs["x"] * 2}

            return stream
        """
    folder = write_package(models_root, "double", source, max_batch_size=1)
    declared = yaml.safe_load((folder / "model.yaml").read_text())
    (folder / "model.yaml").write_text(yaml.safe_dump({**declared, "streams": True}))
    for harness in open_harness(models_root):
        worker = harness.start_worker()
        publish(harness, [foreign(1.0)])
        worker.forwards()
        jobs = [foreign(bad), foreign(5.0)]
        publish(harness, jobs)
        worker.forwards()
        assert [harness.answer(job.job_id) for job in jobs] == ["InputRefused", 10.0]
