"""A claimed job: its name for the broker, and the marks of a lost lease and of a cancellation."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.registry.broker.base import Delivery, Held
from penstock.registry.envelope import JobHeader
from penstock.registry.queues import Priority
from penstock.registry.tensors import encode
from penstock.workers.job import ClaimedJob, inputs_of
from penstock.workers.runtime.base import concatenate
from tests.workers.doubles import job_of

NONE: frozenset[Held] = frozenset()


def test_a_job_is_held_under_its_queue_and_entry():
    """Slot, priority and entry id together name it for the broker."""
    job = job_of(priority=Priority.LOW)
    assert job.held == Held("double", Priority.LOW, job.delivery.entry_id, job.header.id)


@pytest.mark.parametrize(("crashes", "is_suspect"), [(0, False), (1, True), (2, True)])
def test_one_crash_makes_a_suspect(crashes: int, is_suspect: bool):
    """The count comes with the delivery."""
    assert job_of(crashes=crashes).is_suspect is is_suspect


def test_a_lost_lease_is_told_from_that_of_another_entry():
    """An entry id is unique in its queue only: the same id under another priority is another job."""
    job = job_of()
    other = job.held._replace(priority=Priority.HIGH)
    assert not job.mark(frozenset({other}), frozenset())
    assert (job.is_lost, job.is_cancelled) == (False, False)
    assert job.mark(frozenset({job.held}), frozenset())
    assert (job.is_lost, job.is_cancelled) == (True, False)


def test_a_mark_stays():
    """A later update that does not name the job takes nothing back."""
    job = job_of()
    assert job.mark(NONE, frozenset({job.header.id}))
    assert job.mark(NONE, frozenset({"double.another"}))
    assert job.is_cancelled
    assert job.mark(frozenset({job.held}), frozenset())
    assert job.mark(NONE, frozenset())
    assert (job.is_lost, job.is_cancelled) == (True, True)


def undecoded(**inputs: np.ndarray) -> ClaimedJob:
    """A job whose inputs nobody has asked for yet."""
    content, body = encode(inputs)
    header = JobHeader("double.1", "acme", "double", "normal", content)
    return ClaimedJob(Delivery("double", Priority.NORMAL, b"1-1", b""), header, body, len(inputs["x"]), 0.0, 0.0, 0)


@pytest.mark.parametrize("rows", [(1, 1, 1), (1, 3, 2), (0, 2, 0)])
def test_the_inputs_of_several_jobs_are_joined_as_bytes(rows: tuple[int, ...]):
    """The rows of all jobs in order, in writable arrays of the declared dtypes; nothing was decoded job by job."""
    numbers = np.random.default_rng(7)
    inputs: list[dict[str, np.ndarray]] = [
        {"x": numbers.standard_normal((count, 3, 2), np.float32), "k": np.arange(count) + 10 * count} for count in rows
    ]
    jobs = [undecoded(**each) for each in inputs]
    (joined,) = inputs_of(jobs)
    expected = concatenate(inputs)
    assert list(joined) == ["x", "k"]
    for name, values in expected.items():
        np.testing.assert_array_equal(joined[name], values)
        assert (joined[name].dtype, joined[name].flags.writeable) == (values.dtype, True)
    assert [job.decoded for job in jobs] == [None] * len(rows)


@pytest.mark.parametrize(
    "other",
    [{"x": np.zeros((1, 3), np.float32)}, {"x": np.zeros((1, 2))}, {"y": np.zeros((1, 2), np.float32)}],
    ids=str,
)
def test_jobs_that_are_described_in_other_words_are_not_joined(other: dict[str, np.ndarray]):
    """Another width, dtype or name: each job keeps its own arrays."""
    one, two = undecoded(x=np.ones((1, 2), np.float32)), undecoded(**{"x": np.zeros((1, 2), np.float32)} | other)
    assert [[*each] for each in inputs_of([one, two])] == [[*one.inputs], [*two.inputs]]


def test_inputs_that_were_replaced_are_not_read_from_the_body():
    """The signature may have put them into another form."""
    one, two = undecoded(x=np.ones((1, 2), np.float32)), undecoded(x=np.ones((1, 2), np.float32))
    two.decoded = {"x": np.full((1, 2), 7, np.float32)}
    assert [each["x"][0, 0] for each in inputs_of([one, two])] == [1, 7]
