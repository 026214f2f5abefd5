"""A broker with one running job, and a writer of its events."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from penstock.workers.job import ClaimedJob
from penstock.workers.streaming import EventWriter
from tests.workers.streaming.jobs import Broker, writer_of


@pytest.fixture
def broker() -> Broker:
    """With nothing in it."""
    return Broker()


@pytest.fixture
def job(broker: Broker) -> ClaimedJob:
    """A job that runs."""
    (job,) = broker.running()
    return job


@pytest.fixture
def writer(broker: Broker) -> Iterator[EventWriter]:
    """Writes to that broker."""
    writer = writer_of(broker, time.monotonic)
    yield writer
    writer.stop()
