"""The tree of errors: its drawing, the disposition of each, and errors that come from another process."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from penstock.registry import errors
from penstock.registry.errors import (
    BrokerUnavailable,
    Cancelled,
    ConfigurationError,
    Corrupt,
    DeadlineExceeded,
    ForwardTimeout,
    InvalidInput,
    JobFailed,
    JobLost,
    ModelError,
    OutOfMemory,
    PenstockError,
    QueueFull,
    Rejected,
    ResultTimeout,
    Retryable,
    TransitionConflict,
    UndecodableEnvelope,
    UnknownJob,
    described,
    error_named,
    job_failure,
    shown,
)


def every_error(root: type[PenstockError] = PenstockError) -> Iterator[type[PenstockError]]:
    """The errors of the module below a class."""
    for kind in root.__subclasses__():
        if kind.__module__ == errors.__name__:
            yield kind
            yield from every_error(kind)


def test_the_drawing_has_every_error():
    """The module's drawing names each class once, below its base."""
    drawing = (errors.__doc__ or "").partition("\n\n")[2].partition("\n\n")[0]
    drawn: dict[str, str] = {}
    above: dict[int, str] = {}
    for line in drawing.splitlines():
        indent = len(line) - len(line.lstrip())
        # Two spaces part the classes of one line; more of them part a class from its meaning.
        for name in line.strip().partition("   ")[0].split():
            drawn[name] = above.get(indent - 2, "")
            above[indent] = name
    assert drawn == {"PenstockError": "", **{kind.__name__: kind.__bases__[0].__name__ for kind in every_error()}}


def test_every_error_is_exported():
    """A caller can import each class by its name."""
    assert [kind.__name__ for kind in every_error() if kind.__name__ not in errors.__all__] == []


@pytest.mark.parametrize(
    ("root", "disposition"),
    [
        (Rejected, "reject"),
        (Retryable, "retry"),
        (Corrupt, "dead-letter"),
        (JobFailed, "fail"),
        (ConfigurationError, "stop"),
    ],
)
def test_a_disposition_holds_for_the_whole_branch(root: type[PenstockError], disposition: str):
    """Each error below a class does the same to its job."""
    assert {kind.disposition for kind in (root, *every_error(root))} == {disposition}


@pytest.mark.parametrize(
    ("kind", "standard"),
    [
        (InvalidInput, ValueError),
        (UnknownJob, LookupError),
        (JobLost, LookupError),
        (BrokerUnavailable, ConnectionError),
        (OutOfMemory, MemoryError),
        (ResultTimeout, TimeoutError),
        (ForwardTimeout, TimeoutError),
    ],
)
def test_errors_are_also_those_of_the_standard_library(kind: type[PenstockError], standard: type[Exception]):
    """A program that catches the standard error catches ours."""
    assert issubclass(kind, standard)


def test_a_failure_of_a_result_is_its_class():
    """The code of a failure is a class; an unknown code becomes JobFailed and keeps the code in its text."""
    assert type(job_failure("ModelError", "ValueError: x")) is ModelError
    assert type(job_failure("Cancelled", "")) is Cancelled
    newer = job_failure("Quarantined", "why")
    assert (type(newer), str(newer)) == (JobFailed, "Quarantined: why")


@pytest.mark.parametrize("kind", [ModelError, ForwardTimeout])
def test_a_failure_names_the_line_of_the_model_and_can_be_pickled(kind: type[JobFailed]):
    """The text ends with the line; the attributes survive the way to another process, as in a pool of processes."""
    error = job_failure(kind.__name__, "KeyError: 'k'", where="model.py, line 7, in predict", traceback="Traceback")
    for each in (error, pickle.loads(pickle.dumps(error)), copy.copy(error)):  # noqa: S301  # our own bytes
        assert type(each) is kind
        assert str(each) == "KeyError: 'k' (model.py, line 7, in predict)"
        assert (each.where, each.traceback) == ("model.py, line 7, in predict", "Traceback")
    assert (ModelError("x").where, ModelError("x").traceback) == ("", "")


def test_a_failure_of_a_result_is_no_other_error():
    """A result cannot make `result()` raise an error of the broker or of the settings."""
    assert type(job_failure("ConfigurationError", "text")) is JobFailed


def test_an_error_of_another_process_is_its_class():
    """Every class arrives by its name; an unknown one becomes PenstockError and keeps the name in its text."""
    for kind in (PenstockError, TransitionConflict, UndecodableEnvelope, DeadlineExceeded, QueueFull):
        arrived = error_named(kind.__name__, "the text")
        assert (type(arrived), str(arrived)) == (kind, "the text")
    newer = error_named("Quarantined", "why")
    assert (type(newer), str(newer)) == (PenstockError, "Quarantined: why")


def test_received_names_cannot_break_a_message():
    """A name in a message has at most 80 characters and no line break."""
    assert shown("x" * 100) == "x" * 80
    assert shown("a\nb") == repr("a\nb")
    assert described("x" * 100) == repr("x" * 80)
    assert described("a\nb") == r"'a\nb'"


def test_received_values_are_described_without_their_contents():
    """Plain values are shown shortened; for all others the message names the type."""
    assert (described(None), described(True), described(1.5)) == ("None", "True", "1.5")
    assert len(described(10**100)) == 80
    assert described({"secret": 1}) == "of type dict"
    assert described([1] * 1000) == "of type list"
