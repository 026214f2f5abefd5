"""What is told about an exception of a model: the log and the monitor get the traceback, the client gets the line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.compose.jobs.report import describe
from penstock.producers.job_state import open_outcome
from penstock.registry.envelope import open_result
from penstock.registry.errors import ModelError
from penstock.safety.privacy import InputRedactor
from tests.faults.models import RAISING, write_misbehaving
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


@pytest.mark.parametrize("fault", RAISING)
def test_whatever_a_model_raises_fails_its_job_alone(
    fault: str, harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """The job fails at once, its neighbours in the batch are answered, and the thread of the model lives."""
    write_misbehaving(models_root, forward_log, "fragile", [RAISING[fault]])
    worker = harness.start_worker()
    jobs = harness.publish("fragile", 1, 2, -1, 4)
    worker.forwards()
    header, _ = open_result(harness.job_record(jobs[2]).result, UNSIGNED)
    assert header.error is not None
    assert header.error.where.startswith("model.py, line")
    assert [harness.answer(job) for job in (*jobs[:2], jobs[3])] == [2, 4, 8]
    assert worker.journal.jobs == []


def test_texts_of_exceptions_are_redacted(models_root: Path, caplog: pytest.LogCaptureFixture):
    """CF-034: with patterns the text loses what they find before it reaches log, monitor, record and client."""
    source = """
    def build():
        def forward(inputs):
            if inputs["x"].any():
                raise ValueError(f"found {inputs['x'][0, 0]:.0f} in row 1")
            return {"y": inputs["x"] * 2}
        return forward
    """
    write_package(models_root, "raiser", source)
    queue = {"lease_s": LEASE_S, "client_tracebacks": True}
    for harness in open_harness(models_root, queue=queue, privacy={"redact_patterns": ["[0-9]{8}"]}):
        job_id, shown = failed(harness)
        assert "found -[REDACTED] in row 1" in str(shown)
        told = [
            str(shown),
            shown.traceback,
            repr(harness.job_record(job_id).result),
            repr([vars(record) for record in caplog.records]),
            repr(harness.workers[0].notes.errors),
        ]
        assert [text for text in told if "47110816" in text] == []


PRIVATE = [
    {"privacy": {"mode": "hashes_only", "seal_payloads": "off"}},
    {"privacy": {"seal_payloads": "off"}, "cache": {"privacy_mode": "persisted_encrypted"}},
]


@pytest.mark.parametrize("settings", PRIVATE)
@pytest.mark.parametrize(
    ("error", "name"), [("ValueError", "ValueError"), ("ModelError", "ModelError"), ("MemoryError", "MemoryError")]
)
def test_a_privacy_mode_keeps_texts_of_exceptions_back(
    error: str, name: str, settings: dict[str, Any], models_root: Path, caplog: pytest.LogCaptureFixture
):
    """Log, monitor, record and client get class, file and line; the text, which has the input, nowhere."""
    source = f"""
    from penstock import ModelError

    def build():
        def forward(inputs):
            if inputs["x"].any():
                raise {error}(f"found {{inputs['x'][0, 0]:.0f}}")
            return {{"y": inputs["x"] * 2}}
        return forward
    """
    write_package(models_root, "raiser", source)
    for harness in open_harness(models_root, queue={"lease_s": LEASE_S, "client_tracebacks": True}, **settings):
        job_id, shown = failed(harness)
        assert shown.where == "model.py, line 7, in forward"
        assert "text withheld" in str(shown)
        assert name in f"{type(shown).__name__}: {shown}"
        told = [
            str(shown),
            shown.traceback,
            repr(harness.job_record(job_id).result),
            repr(describe(harness.broker, job_id, UNSIGNED, 3600, InputRedactor())),
            repr([vars(record) for record in caplog.records]),
            repr(harness.workers[0].notes.errors),
        ]
        assert [text for text in told if "47110816" in text] == []
        assert "raise " in shown.traceback
