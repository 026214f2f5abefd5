"""How many jobs a version takes beside those that it has."""

from __future__ import annotations

import pytest

from tests.workers.doubles import job_of, ready_version


@pytest.mark.parametrize(
    ("max_rows", "forward_s", "free"),
    [
        (1, None, [2, 1, 0]),
        (1, 0.02, [2, 1, 0]),
        (1, 0.004, [5, 4, 0]),
        (1, 0.000_001, [16, 15, 0]),
        (4, 0.004, [16, 15, 14]),
        (16, 0.004, [32, 31, 30]),
    ],
)
def test_a_version_of_short_forwards_takes_the_jobs_of_the_next_20_ms(
    max_rows: int, forward_s: float | None, free: list[int]
):
    """It asks again when fewer jobs are here than two batches have. Two large batches are enough as they are."""
    queue = ready_version(max_rows).queue
    for _ in range(8 if forward_s else 0):
        queue.note_forward(forward_s or 0.0)
    found = [queue.free]
    for _ in range(2):
        queue.reserve(job_of())
        found.append(queue.free)
    assert found == free
    queue.in_memory = 40
    assert queue.free == 0


def test_one_long_forward_does_not_end_it_and_two_do():
    """The system stops any thread now and then."""
    queue = ready_version(1).queue
    for _ in range(8):
        queue.note_forward(0.004)
    queue.note_forward(1.0)
    assert queue.free == 5
    queue.note_forward(1.0)
    assert queue.free == 2
