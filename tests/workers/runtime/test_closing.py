"""A stream is closed behind its last chunk, whatever its model does about it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.registry.errors import ModelError
from penstock.workers.runtime.base import DeviceLost, InstanceLost
from penstock.workers.runtime.closing import close_stream
from penstock.workers.runtime.tracebacks import trace_of
from tests.workers.runtime.formats import opened
from tests.workers.runtime.jobs import Listener, drained
from tests.workers.runtime.test_loading import write_stream

Stream = Generator[int, None, None]
ROW = {"x": np.zeros((1, 4), np.float32)}


class Own(BaseException):
    """No `except Exception` sees it."""


def swallowing() -> Stream:
    """Yields on once."""
    try:
        yield 1
    except GeneratorExit:
        yield 2


def raising(error: BaseException) -> Callable[[], Stream]:
    """Raises this in the place of its end."""

    def stream() -> Stream:
        try:
            yield 1
        finally:
            raise error

    return stream


@pytest.mark.parametrize(
    "open_stream",
    [swallowing, *map(raising, (ValueError("x"), KeyboardInterrupt(), SystemExit(3), Own()))],
    ids=["yields on", "ValueError", "KeyboardInterrupt", "SystemExit", "own"],
)
def test_a_model_that_refuses_is_logged_and_no_more(
    open_stream: Callable[[], Stream], caplog: pytest.LogCaptureFixture
):
    """One warning with the class of the exception, and nothing is raised."""
    steps = open_stream()
    next(steps)
    with caplog.at_level(logging.WARNING, "penstock.runtime"):
        close_stream(steps)
    assert [record.getMessage() for record in caplog.records] == ["a model refused to end its stream"]
    assert "ValueError('x')" not in caplog.text


def test_a_lost_device_is_told_and_a_lost_instance_is_not():
    """The process must go after the first; the second has been replaced, and the job has its answer."""
    lost = raising(DeviceLost("gone"))()
    next(lost)
    with pytest.raises(DeviceLost):
        close_stream(lost)
    instance = raising(InstanceLost("gone", "incident"))()
    next(instance)
    close_stream(instance)


def test_a_model_that_refuses_to_end_its_warm_up_is_loaded(models_root: Path):
    """As its jobs would be cancelled: it is closed, and the next stream runs."""
    body = """
    for number in range(20):
        try:
            yield {"n": number}
        except GeneratorExit:
            raise ValueError("not now")
    return {"y": inputs["x"]}
    """
    runtime = opened(write_stream(models_root, body), warmup_requests=1)
    assert len(drained(runtime.stream(ROW, Listener()))[0]) == 20


@pytest.mark.parametrize("goes_on", ["raise", "pass", "raise KeyError('other')"])
def test_a_refused_chunk_has_the_line_of_its_yield(models_root: Path, goes_on: str):
    """The caller refuses it, the model may do what it likes, and the refusal comes back with the model's frame."""
    body = f"""
    try:
        yield {{"n": 1}}
    except BaseException:
        {goes_on}
    yield {{"n": 2}}
    return {{"y": inputs["x"]}}
    """
    steps: Any = opened(write_stream(models_root, body), warmup_requests=0).stream(ROW, Listener())
    next(steps)
    refusal = ModelError("too large")
    with pytest.raises(ModelError) as raised:
        steps.throw(refusal)
    assert raised.value is refusal
    assert trace_of(refusal).where == "model.py, line 5, in stream"
