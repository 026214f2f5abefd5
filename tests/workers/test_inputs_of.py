"""Inputs that are joined as bytes: for the runtime the same arrays as those of each job, concatenated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.registry.tensors import DTYPES, STRING
from penstock.workers.job import ClaimedJob, inputs_of
from penstock.workers.runtime.base import concatenate
from tests.workers.claims_of_jobs import KINDS, UNSIGNED, Kind, Sealer, delivery_of
from tests.workers.test_shared_headers import Reader

NUMBERS = sorted(set(DTYPES) - {STRING})
TENSOR = st.tuples(st.sampled_from(NUMBERS), st.sampled_from([(), (1,), (3, 2), (0,)]))


def jobs_of(kinds: list[Kind]) -> list[ClaimedJob]:
    """One job of each kind, claimed together; behind others of these kinds, so that their headers are known."""
    sealer = Sealer(UNSIGNED)
    deliveries = [delivery_of(sealer.job(kind), kind, number) for number, kind in enumerate([*kinds, *kinds])]
    return Reader(UNSIGNED).open_all(deliveries, 77.0, 6500.0)[len(kinds) :]


def assert_joined(jobs: list[ClaimedJob], again: list[ClaimedJob]) -> None:
    """What a runtime gets of `jobs` is what it gets of equal jobs that are decoded one by one."""
    joined, expected = concatenate(inputs_of(jobs)), concatenate([job.inputs for job in again])
    assert list(joined) == list(expected)
    for name, values in expected.items():
        assert (joined[name].dtype, joined[name].shape) == (values.dtype, values.shape)
        is_text = values.dtype == object
        assert joined[name].tolist() == values.tolist() if is_text else joined[name].tobytes() == values.tobytes()
        assert joined[name].flags.writeable


@settings(max_examples=150, derandomize=True)
@given(
    tensors=st.lists(TENSOR, min_size=1, max_size=4),
    rows=st.integers(0, 4),
    count=st.integers(1, 6),
    asked=st.sets(st.integers(0, 5), max_size=2),
)
def test_alike_jobs_are_joined_as_they_are_concatenated(
    tensors: list[tuple[str, tuple[int, ...]]], rows: int, count: int, asked: set[int]
):
    """Of one or several inputs, of each dtype, with any number of rows; also if some were asked for before."""
    kind = Kind(
        lambda number: {
            f"t{index}": (np.arange(rows * int(np.prod(row))) * 3 + number + index)
            .astype(DTYPES[dtype])
            .reshape(rows, *row)
            for index, (dtype, row) in enumerate(tensors)
        }
    )
    jobs, again = jobs_of([kind] * count), jobs_of([kind] * count)
    before = [job for index, job in enumerate(jobs) if index in asked and job.inputs]
    assert_joined(jobs, again)
    is_joined = count > 1 and not before
    assert len(inputs_of(jobs)) == (1 if is_joined else count)
    assert all(job.decoded is None for job in jobs) or not is_joined, "a job of a joined batch is decoded by nobody"


@pytest.mark.parametrize(
    "kinds",
    [
        ["plain", "another tenant", "plain"],
        ["texts", "texts"],
        ["several rows", "several rows", "plain"],
        ["a trace", "a trace"],
    ],
    ids=", ".join,
)
def test_jobs_of_several_kinds_are_concatenated(kinds: list[str]):
    """Texts, and jobs whose headers were not seen together."""
    assert_joined(jobs_of([KINDS[kind] for kind in kinds]), jobs_of([KINDS[kind] for kind in kinds]))


def test_a_joined_input_leaves_the_received_bytes_alone():
    """A model may write to its inputs; a dead letter still needs the bytes."""
    jobs = jobs_of([KINDS["plain"]] * 3)
    before = [bytes(job.delivery.sealed) for job in jobs]
    (joined,) = inputs_of(jobs)
    joined["x"][:] = -1
    assert [job.delivery.sealed for job in jobs] == before
    assert [float(job.inputs["x"][0, 0]) for job in jobs] != [-1.0] * 3
