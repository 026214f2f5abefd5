"""How many jobs a worker claims for an engine that has more seats than pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import structs

from penstock.registry.package import load_package
from penstock.registry.queues import Priority
from penstock.registry.settings_sections import InferenceConfig
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.version import ServedModel, ServedVersion
from tests.workers.generation.packages import write_writer
from tests.workers.streaming.jobs import Broker

SEATS = 4
URGENT = 4
"""Jobs that may come in beyond the seats."""


@pytest.fixture(scope="module")
def version(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedVersion]:
    """A version with an engine whose pages have room for one of the longest texts; it has run none yet."""
    root: Path = tmp_path_factory.mktemp("credit")
    package = write_writer(root, max_model_len=None, max_num_seqs=SEATS, kv_cache_mb=0.1)
    version = ServedVersion(load_package(package), InferenceConfig())
    yield version
    version.unload()


def _jobs(count: int, priority: Priority) -> list[ClaimedJob]:
    jobs = Broker().running(count)
    for job in jobs:
        job.delivery = structs.replace(job.delivery, priority=priority)
    return jobs


def test_pages_bound_the_credit_of_an_engine(version: ServedVersion):
    """One job fills its pages. Then more urgent ones may come in, as many as beyond the seats of another engine."""
    model = ServedModel("writer", version)
    assert model.free == SEATS
    version.runtime.load("cpu", 1)
    version.has_loaded()
    assert (model.free, model.awaits_pages, model.free_for_urgent) == (1, False, (0, 0))
    jobs = _jobs(URGENT + 1, Priority.LOW)
    version.queue.reserve(jobs[0])
    assert (model.free, model.awaits_pages) == (0, True)
    for number, job in enumerate(jobs[1:]):
        assert model.free_for_urgent == (URGENT - number, int(Priority.LOW))
        version.queue.reserve(job)
    assert model.free_for_urgent == (0, 0)
    version.queue.release_all(jobs)
    assert (model.free, model.awaits_pages) == (1, False)
