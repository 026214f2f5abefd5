"""What is told about an exception of a model: the log and the monitor get the traceback, the client gets the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.producers.job_state import open_outcome
from penstock.registry.errors import ModelError
from tests.packages import write_package, write_raiser
from tests.workers.stepped import LEASE_S, UNSIGNED, SteppedHarness, open_harness

RAISE = 'raise ValueError("a negative row")'
PLACE = "model.py, line 5, in forward"
RAISES_TOGETHER = """
def build():
    def forward(inputs):
        if len(inputs["x"]) > 2:
            raise ValueError("too many together")
        return {"y": inputs["x"] * 2}
    return forward
"""


def failed(harness: SteppedHarness) -> tuple[str, ModelError]:
    """A job whose model raised: its id, and what its client sees."""
    worker = harness.start_worker()
    (job_id,) = harness.publish("raiser", -47110816)
    worker.forwards()
    with pytest.raises(ModelError) as raised:
        open_outcome(job_id, harness.job_record(job_id), UNSIGNED).outputs()
    return job_id, raised.value


def test_a_client_learns_the_line_and_no_path(harness: SteppedHarness, models_root: Path):
    """The message names file, line and function of the package; the traceback stays in the worker."""
    write_raiser(models_root)
    job_id, error = failed(harness)
    assert str(error) == f"ValueError: a negative row ({PLACE})"
    assert (error.where, error.traceback) == (PLACE, "")
    assert str(models_root).encode() not in harness.job_record(job_id).result
    assert RAISE.encode() not in harness.job_record(job_id).result


def test_a_client_gets_the_traceback_where_the_settings_say_so(models_root: Path):
    """With `queue.client_tracebacks` the error carries the whole traceback; its text stays the same."""
    write_raiser(models_root)
    for harness in open_harness(models_root, queue={"lease_s": LEASE_S, "client_tracebacks": True}):
        _, error = failed(harness)
        assert str(error) == f"ValueError: a negative row ({PLACE})"
        assert f"{models_root}/raiser/1/model.py" in error.traceback
        assert RAISE in error.traceback


def traces(caplog: pytest.LogCaptureFixture, event: str) -> list[Any]:
    """The tracebacks in the log lines of this event."""
    return [vars(record)["exception"] for record in caplog.records if record.getMessage() == event]


def test_the_log_and_the_monitor_have_the_traceback(
    harness: SteppedHarness, models_root: Path, caplog: pytest.LogCaptureFixture
):
    """Once per failed job, with the code and without the inputs; the end that monitors are told has it, too."""
    write_raiser(models_root)
    failed(harness)
    (trace,) = traces(caplog, "a job failed")
    assert RAISE in trace
    assert "4711" not in trace
    (error,) = harness.workers[0].notes.errors
    assert error.traceback == trace
    assert error.where == PLACE


def test_an_exception_of_a_batch_alone_is_logged(
    harness: SteppedHarness, models_root: Path, caplog: pytest.LogCaptureFixture
):
    """A model raises for the batch and for none of its jobs: all are answered, and the log has the traceback."""
    write_package(models_root, "together", RAISES_TOGETHER)
    worker = harness.start_worker()
    jobs = harness.publish("together", 1, 2, 3, 4)
    worker.forwards()
    assert [harness.answer(job) for job in jobs] == [2, 4, 6, 8]
    (trace,) = traces(caplog, "a batch failed and is bisected")
    assert 'raise ValueError("too many together")' in trace
    assert traces(caplog, "a job failed") == []


HOSTILE = """
class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__

def build():
    def forward(inputs):
        if inputs["x"].any():
            raise {error}
        return {{"y": inputs["x"] * 2}}
    return forward
"""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("Unreadable()", "Unreadable: (its message cannot be read)"),
        ("ValueError('\\\\udcff')", r"ValueError: \udcff"),
        ("ValueError('x' * 10_000)", "ValueError: " + "x" * 488),
    ],
    ids=["no text", "no UTF-8", "long"],
)
def test_an_exception_with_any_text_fails_its_job_alone(
    error: str, text: str, harness: SteppedHarness, models_root: Path
):
    """The worker sends the failure and goes on with the next job, whatever text the exception has."""
    write_package(models_root, "hostile", HOSTILE.format(error=error))
    worker = harness.start_worker()
    (bad,) = harness.publish("hostile", 1)
    worker.forwards()
    with pytest.raises(ModelError) as raised:
        open_outcome(bad, harness.job_record(bad), UNSIGNED).outputs()
    assert str(raised.value) == f"{text} (model.py, line 10, in forward)"
    (good,) = harness.publish("hostile", 0)
    worker.forwards()
    assert harness.answer(good) == 0
