"""The batches of a process: those that end without a place, and lines whose jobs expire before the batch does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from penstock.producers.async_client import AsyncJobHandle
from penstock.producers.gateway.batches.batch_run import Endpoint, LineJob
from penstock.producers.gateway.batches.file_store import FileStore, new_id
from penstock.producers.gateway.batches.records import ENDED, Batch, BatchStatus, Counts, StoredBatch
from penstock.producers.gateway.batches.runner import BatchRunner, RunOptions
from penstock.producers.gateway.callers import Access
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.gateway.key_copy import KeyCopy
from penstock.producers.gateway.limits import RateLimits
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable, InvalidInput, ModelNotReady
from penstock.registry.queues import DerivedIds
from penstock.registry.settings import Settings
from tests.conftest import StartWorker
from tests.packages import recorded_forwards, write_recorder
from tests.producers.conftest import announce
from tests.servers import RedisServer, wait_until

HOUR_S = 3600
NOW_S = int(time.time())


class _Store(FileStore):
    """Before it keeps the rounds of lines, it looks for jobs that are in these rounds already.

    is_slow: a batch has ended before any other change of it is written. stopped_changes: of a batch that is cancelled.
    """

    model = ""
    server: RedisServer | None = None
    early_jobs = 0
    looks = 0
    is_slow = False
    late_changes = 0
    stopped_changes = 0

    def change_batch(self, tenant: str, batch_id: str, change: Callable[[StoredBatch], StoredBatch]) -> StoredBatch:
        """As before."""
        if self.is_slow:
            self.late_changes += 1
            wait_until(lambda: self.batch(tenant, batch_id).batch.status in ENDED, 60, "the batch has ended")
        before = self.batch(tenant, batch_id)
        self.stopped_changes += before.batch.status == "cancelling"
        new = dict(change(before).rounds.items() - before.rounds.items())
        if self.server is not None and new:
            self.looks += 1
            states = states_of(self.server, job_ids(self.model, batch_id, new))
            self.early_jobs += sum(state is not None for state in states)
        return super().change_batch(tenant, batch_id, change)


class _DeafClient(GatewayClient):
    """The broker accepts its jobs, and it does not hear of that."""

    async def submit_items(self, *args: Any, **options: Any) -> list[AsyncJobHandle]:
        """As before."""
        await super().submit_items(*args, **options)
        raise BrokerUnavailable("The broker did not answer. Expected an answer within the time-out")


def job_ids(model: str, batch_id: str, rounds: Mapping[int, int]) -> list[str]:
    """The ids of the jobs of lines, by the numbers of the lines and their rounds."""
    names = {number: f"{batch_id}.{each}" if each else batch_id for number, each in rounds.items()}
    return [DerivedIds(model, name, NOW_S * 1000).of(number) for number, name in names.items()]


def states_of(server: RedisServer, ids: list[str]) -> list[str | None]:
    """The states of jobs; None: the broker has no such job."""
    with closing(RedisStreams.from_url(server.url)) as broker:
        return [None if record is None else record.state.name for record in broker.job_records(ids)]


class Site:
    """A store, and processes that run its batches one after the other."""

    make_client: type[GatewayClient] = GatewayClient
    max_outstanding = 2048

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self._folder = folder
        self._server = server
        self.store = _Store(folder / "files", None, max_bytes=10**9, keep_s=HOUR_S, clock=lambda: NOW_S)

    def batch(self, lines: int = 3, window_s: int = HOUR_S, status: BatchStatus = "validating") -> StoredBatch:
        """A batch of lines, in the store."""
        upload = self.store.upload()
        for number in range(lines):
            upload.append(b'{"custom_id": "n%d", "method": "POST", "url": "/e", "body": %d}\n' % (number, number))
        file = self.store.keep(upload, "a", "lines.jsonl", "batch")
        batch = Batch(
            id=new_id("batch_"),
            endpoint="/e",
            input_file_id=file.id,
            completion_window="1h",
            created_at=NOW_S,
            expires_at=NOW_S + window_s,
            status=status,
        )
        return self.store.add_batch(StoredBatch("a", new_id("file-"), new_id("file-"), batch))

    def run(self, endpoint: Endpoint, until: Callable[[], object], **settings: object) -> None:
        """A process that runs the batches until a condition holds."""

        async def process() -> None:
            found = Settings.load(environ={}, cwd=self._folder, overrides=settings)
            client = self.make_client(self._server.url, settings=found)
            async with client:
                limits = RateLimits(found.inference.safeguards.rate_limit, client.spend)
                access = Access(found, KeyCopy(lambda _: []), limits)
                options = RunOptions(
                    lambda _: endpoint, access.resume, lambda _: (500, b'"failed"'), self.max_outstanding, 1000
                )
                runner = BatchRunner(self.store, client, options, clock=lambda: NOW_S)
                runner.start()
                try:
                    async with asyncio.timeout(60):
                        while not await asyncio.to_thread(until):
                            await asyncio.sleep(0.01)
                finally:
                    await runner.aclose()

        asyncio.run(process())

    def stop(self, stored: StoredBatch, code: str) -> None:
        """Cancels a batch, or ends its time."""
        end = {"status": "cancelling"} if code == "cancelled" else {"expires_at": NOW_S}
        self.store.change_batch(
            stored.tenant, stored.batch.id, lambda before: replace(before, batch=replace(before.batch, **end))
        )

    def found(self, stored: StoredBatch) -> StoredBatch:
        """A batch as it is now."""
        return self.store.batch(stored.tenant, stored.batch.id)

    def has_ended(self, stored: StoredBatch) -> bool:
        """Whether no process runs it any more."""
        return self.found(stored).batch.status in ENDED


@pytest.fixture
def site(tmp_path: Path, redis_server: RedisServer) -> Site:
    """Without a process."""
    return Site(tmp_path, redis_server)


def doubling(model: str) -> Endpoint:
    """Lines that ask a model."""

    async def endpoint(body: bytes) -> LineJob:
        inputs = {"x": np.array([[float(body) + 1, 0, 0, 0]], np.float32)}
        return LineJob(model, inputs, None, ("y",), lambda outputs, _version, _job_id: b"%d" % outputs["y"][0, 0])

    return endpoint


def test_a_batch_ends_without_a_place(site: Site):
    """Cancelled and expired batches end while others take all places, and none of their lines is submitted."""
    asked: list[bytes] = []

    async def hold(body: bytes) -> LineJob:
        asked.append(body)
        never: asyncio.Future[LineJob] = asyncio.get_running_loop().create_future()
        return await never

    held = [site.batch(lines=1) for _ in range(4)]
    waiting = site.batch(lines=2)
    cancelled = [site.batch(lines=3, status="cancelling") for _ in range(6)]
    expired = site.batch(lines=3, window_s=0)
    site.run(hold, lambda: all(map(site.has_ended, [*cancelled, expired])) and len(asked) == 4)
    assert asked == [b"0"] * 4
    assert not any(map(site.has_ended, [*held, waiting]))
    for stored, status in ((cancelled[0], "cancelled"), (cancelled[-1], "cancelled"), (expired, "expired")):
        batch = site.found(stored).batch
        assert (batch.status, batch.request_counts) == (status, Counts(3, 0, 3))
        assert batch.error_file_id is not None
        content = b"".join(site.store.content(site.store.file("a", batch.error_file_id)))
        assert content.count(b'"batch_%s"' % status.encode()) == 3


def test_progress_that_is_written_late_changes_no_end(site: Site):
    """A batch keeps the counts of its end, also where a thread writes earlier ones after that."""
    stored = site.batch()
    site.store.is_slow = True

    async def refuse(_: bytes) -> LineJob:
        while not site.store.late_changes:
            await asyncio.sleep(0.01)
        raise InvalidInput("Bad line. Expected another one")

    site.run(refuse, lambda: site.has_ended(stored))
    assert site.store.late_changes == 1
    found = site.found(stored).batch
    assert (found.status, found.request_counts) == ("completed", Counts(3, 0, 3))


def test_lines_outlive_their_jobs(site: Site, redis_server: RedisServer, start_worker: StartWorker, tmp_path: Path):
    """While the window is open, a line whose job has expired is submitted again. Each runs once and has its answer."""
    announce(redis_server, "recorder")
    stored = site.batch()
    site.run(doubling("recorder"), lambda: len(site.found(stored).rounds) == 3, **{"queue.job_ttl_s": 0.2})
    write_recorder(tmp_path / "models", tmp_path / "forwards")
    start_worker(redis_server, tmp_path / "models")
    site.run(doubling("recorder"), lambda: site.has_ended(stored))
    found = site.found(stored)
    assert (found.batch.status, found.batch.request_counts) == ("completed", Counts(3, 3, 0))
    assert found.rounds == {}
    # The warm-up runs zeros.
    ran = [row for rows in recorded_forwards(tmp_path / "forwards") for row in rows if row]
    assert sorted(ran) == [1.0, 2.0, 3.0]


def test_a_restart_goes_on_in_the_round_of_each_line(site: Site, redis_server: RedisServer, announced: str):
    """Also without the records of earlier rounds in the broker. A round is kept before it has a job."""
    stored = site.batch()
    site.store.model, site.store.server = announced, redis_server
    site.run(doubling(announced), lambda: len(site.found(stored).rounds) == 3, **{"queue.job_ttl_s": 0.2})
    assert site.store.looks > 0
    assert site.store.early_jobs == 0
    with redis_server.client() as redis:
        redis.flushall()
    announce(redis_server, announced)
    rounds = site.found(stored).rounds
    ids = job_ids(announced, stored.batch.id, rounds)
    site.run(doubling(announced), lambda: states_of(redis_server, ids) == ["QUEUED"] * 3)
    assert site.found(stored).rounds == rounds
    with redis_server.client() as redis:
        assert redis.xlen(f"infer.{{{announced}}}.low") == 3


@pytest.mark.parametrize("code", ["cancelled", "expired"])
def test_a_stopped_batch_cancels_the_jobs_of_an_earlier_process(
    site: Site, redis_server: RedisServer, announced: str, code: str
):
    """Those that a killed process left, in the round of their line; a line that no process began costs nothing."""
    site.max_outstanding = 4
    stored = site.batch(lines=5)
    left = dict.fromkeys((1, 2, 3, 4), 0)
    ids = job_ids(announced, stored.batch.id, left)
    site.run(doubling(announced), lambda: states_of(redis_server, ids) == ["QUEUED"] * 4)
    site.stop(stored, code)
    asked: list[bytes] = []

    async def endpoint(body: bytes) -> LineJob:
        asked.append(body)
        return await doubling(announced)(body)

    site.run(endpoint, lambda: site.has_ended(stored))
    assert states_of(redis_server, ids) == ["CANCELLED"] * 4
    assert sorted(asked) == [b"0", b"1", b"2", b"3"]
    batch = site.found(stored).batch
    assert (batch.status, batch.request_counts) == (code, Counts(5, 0, 5))


def test_a_batch_that_is_stopped_before_it_goes_on_cancels_its_jobs(
    site: Site, redis_server: RedisServer, announced: str
):
    """The lines wait for a worker when the batch is cancelled, and jobs of an earlier process are in a later round."""
    stored = site.batch()
    site.run(doubling(announced), lambda: len(site.found(stored).rounds) == 3, **{"queue.job_ttl_s": 0.2})
    with redis_server.client() as redis:
        # A job of the short lifetime may be there, and would have its line in one more round.
        redis.flushall()
    announce(redis_server, announced)
    ids = job_ids(announced, stored.batch.id, site.found(stored).rounds)
    site.run(doubling(announced), lambda: states_of(redis_server, ids) == ["QUEUED"] * 3)

    async def endpoint(body: bytes) -> LineJob:
        if not site.store.stopped_changes:
            site.stop(stored, "cancelled")
            # The first look at it stops the run, the second one comes afterwards.
            while site.store.stopped_changes < 2:
                await asyncio.sleep(0.01)
            raise ModelNotReady("No worker has the model. Expected one")
        return await doubling(announced)(body)

    site.run(endpoint, lambda: site.has_ended(stored))
    assert states_of(redis_server, ids) == ["CANCELLED"] * 3


def test_a_stopped_batch_cancels_jobs_that_may_be_accepted(site: Site, redis_server: RedisServer, announced: str):
    """The answer of their submit was lost, and the batch is cancelled before they are submitted again."""
    stored = site.batch()
    ids = job_ids(announced, stored.batch.id, dict.fromkeys((1, 2, 3), 0))

    def has_ended() -> bool:
        if states_of(redis_server, ids) == ["QUEUED"] * 3 and site.found(stored).batch.status == "in_progress":
            site.stop(stored, "cancelled")
        return site.has_ended(stored)

    site.make_client = _DeafClient
    site.run(doubling(announced), has_ended)
    assert states_of(redis_server, ids) == ["CANCELLED"] * 3
