"""The heartbeat of a worker, read from the other end of its pipe."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.workers.process import heartbeat


@contextmanager
def beating(monkeypatch: pytest.MonkeyPatch, unhealthy_reason: Callable[[], str | None]) -> Iterator[FileIO]:
    """The reading end of the pipe of a heartbeat, which ends with the block."""
    reading, writing = os.pipe()
    ends = threading.Event()
    # The thread sends this process a SIGTERM when the reading end is closed.
    monkeypatch.setattr("os.kill", lambda _pid, _signal: ends.set())
    thread = heartbeat.start(writing, unhealthy_reason)
    try:
        with FileIO(reading, "r") as reader:
            yield reader
    finally:
        thread.join(30)
        os.close(writing)
    assert ends.is_set()


def test_a_healthy_worker_writes_empty_lines(monkeypatch: pytest.MonkeyPatch):
    """Without a reason to be replaced, every beat is an empty line. A reader that is gone ends the process."""
    with beating(monkeypatch, lambda: None) as reader:
        assert [reader.readline() for _ in range(2)] == [b"\n", b"\n"]


def test_a_reason_fits_into_one_line(monkeypatch: pytest.MonkeyPatch):
    """Line breaks in a reason become spaces, and a long reason is cut: the supervisor reads line by line."""
    with beating(monkeypatch, lambda: "the device is lost:\nCUDA error " + "x" * 1000) as reader:
        line = reader.readline()
    assert line.startswith(b"the device is lost: CUDA error xxx")
    assert len(line) == 501


def test_a_pipe_that_a_model_closed_is_written_to_no_more():
    """The number belongs to a connection by now: it hears nothing, and the heartbeat ends."""
    reading, writing = os.pipe()
    thread = heartbeat.start(writing, lambda: None)
    assert os.read(reading, 1) == b"\n"
    ours, theirs = os.pipe()
    os.set_blocking(ours, False)
    os.dup2(theirs, writing)
    thread.join(30)
    assert not thread.is_alive()
    with pytest.raises(BlockingIOError):
        os.read(ours, 1)
    for fd in (reading, writing, ours, theirs):
        os.close(fd)


def test_a_closed_descriptor_is_a_mistake_of_the_settings():
    """A PENSTOCK_HEARTBEAT_FD that is no open pipe was set by hand."""
    reading, writing = os.pipe()
    os.close(reading)
    os.close(writing)
    with pytest.raises(ConfigurationError, match="is not an open pipe"):
        heartbeat.start(writing, lambda: None)
