"""Idle models: serving them beside a busy one costs the busy one next to nothing."""

from __future__ import annotations

from pathlib import Path

from tests.counting import lines_run
from tests.packages import write_double
from tests.workers.stepped import SteppedHarness, open_harness

JOBS = 500


def work_for_jobs(harness: SteppedHarness) -> tuple[int, int]:
    """(forwards, lines of Python) that the jobs of the busy model cost a worker for all models of the root."""
    worker = harness.start_worker()
    batches: list[list[str]] = []

    def answer_all() -> None:
        for first in range(0, JOBS, 50):
            harness.publish("busy", *range(first, first + 50))
            batches.extend(worker.forwards())

    lines = lines_run(answer_all)
    assert sum(map(len, batches)) == JOBS
    return len(batches), lines


def test_idle_models_cost_a_busy_one_nothing(models_root: Path):
    """Beside three idle models the jobs of one need as many forwards, and at most a quarter more lines of Python."""
    write_double(models_root, "busy")
    for harness in open_harness(models_root):
        forwards_alone, lines_alone = work_for_jobs(harness)
    for number in range(3):
        write_double(models_root, f"idle-{number}")
    for harness in open_harness(models_root):
        forwards, lines = work_for_jobs(harness)
    assert forwards == forwards_alone
    assert lines <= 1.25 * lines_alone
