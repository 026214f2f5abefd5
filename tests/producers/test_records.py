"""A job by its id, without a worker: who may see it, for how long, and what withdrawing it does."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock import AsyncClient, CancelStatus, Client
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Keyring, open_job
from penstock.registry.errors import Cancelled, PenstockError, ResultGone, ResultTimeout, UnknownJob
from penstock.registry.queues import Priority, job_time_ms, new_job_id, stream_key
from penstock.registry.settings import Settings
from tests.producers.answers import claim, end, held
from tests.servers import ROOT, RedisServer, wait_until

INPUTS = {"x": np.ones((1, 4), np.float32)}
RESULT_TTL_S = 0.3


@pytest.fixture
def forgetful(shared_redis: RedisServer) -> Iterator[Client]:
    """A client whose results are kept for a moment only."""
    settings = Settings.load(overrides={"queue.result_ttl_s": RESULT_TTL_S})
    with Client(shared_redis.url, settings=settings) as client:
        yield client


def _refusals(client: Client, job_id: str) -> list[tuple[type[PenstockError], str]]:
    """What each question about a job is answered with, the id left out."""
    job = client.job(job_id)
    answers = []
    for ask in (job.status, lambda: job.result(180), lambda: list(job.stream()), job.cancel, job.status):
        with pytest.raises(PenstockError) as refused:
            ask()
        answers.append((type(refused.value), str(refused.value).replace(job_id, "<id>")))
    return answers


def test_waiting_job_is_withdrawn(client: Client, parked: str, broker: RedisStreams):
    """cancel() of a waiting job: it leaves the queue, will never run, and its result says so."""
    job = client.submit(parked, INPUTS)
    assert job.cancel() == "cancelled"
    assert job.cancel() == "cancelled"
    assert job.status() == "cancelled"
    with pytest.raises(Cancelled, match="The job was cancelled before it ran"):
        job.result(180)
    assert [event.type for event in job.stream()] == ["queued", "cancelled"]
    assert sum(depth.jobs for depth in broker.depths(parked)) == 0


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_cancel_says_what_it_did(kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """A claimed job is asked to stop; for one that ended it is too late, and then the result needs no further call."""
    with Client(shared_redis.url) as client:
        job_id = client.submit(parked, INPUTS).id
    (claimed,) = claim(broker, parked)
    assert _cancelled(kind, shared_redis.url, job_id) == "requested"
    assert broker.renew("test", [held(claimed)]).cancelled == {job_id}
    end(broker, claimed)
    assert _cancelled(kind, shared_redis.url, job_id) == "too_late"


def _cancelled(kind: str, url: str, job_id: str) -> CancelStatus:
    if kind == "blocking":
        with Client(url) as client:
            return client.job(job_id).cancel()

    async def cancel() -> CancelStatus:
        async with AsyncClient(url) as client:
            return await client.job(job_id).cancel()

    return asyncio.run(cancel())


def test_a_job_that_ended_brings_its_result_with_the_refusal(client: Client, parked: str, broker: RedisStreams):
    """The answer "too_late" has the record: the closed client is not asked again."""
    job = client.job(client.submit(parked, INPUTS).id)
    end(broker, *claim(broker, parked), value=7)
    assert job.cancel() == "too_late"
    client.close()
    assert job.result()["z"].tolist() == [7.0]


def test_first_failure_of_a_map_withdraws_the_rest(client: Client, parked: str, broker: RedisStreams):
    """map raises what the first job ended with, and leaves no job of its own waiting."""
    rows = [np.full(4, number, np.float32) for number in range(8)]
    with ThreadPoolExecutor(1) as pool:
        mapping = pool.submit(client.map, parked, [{"x": row[None]} for row in rows])
        wait_until(lambda: broker.depths(parked)[Priority.NORMAL].jobs == 8, 5, "all jobs wait")
        (first, *_) = broker.read({stream_key(parked, Priority.NORMAL): "0-0"}, 0)
        header, _ = open_job(first.fields[1], Keyring.parse(None))
        assert client.job(header.id).cancel() == "cancelled"
        with pytest.raises(Cancelled):
            mapping.result(180)
    assert sum(depth.jobs for depth in broker.depths(parked)) == 0


def test_asyncio_client_withdraws_a_waiting_job(shared_redis: RedisServer, parked: str):
    """As the blocking client."""

    async def withdraw() -> list[str]:
        async with AsyncClient(shared_redis.url) as client:
            job = await client.submit(parked, INPUTS)
            assert await job.cancel() == "cancelled"
            assert await job.status() == "cancelled"
            with pytest.raises(Cancelled):
                await job.result(180)
            return [event.type async for event in client.job(job.id).stream()]

    assert asyncio.run(withdraw()) == ["queued", "cancelled"]


def test_result_that_is_not_there_in_time_says_so(client: Client, parked: str):
    """ResultTimeout is a TimeoutError, and the job goes on."""
    job = client.submit(parked, INPUTS)
    for timeout in (0, 0.05):
        with pytest.raises(TimeoutError, match="the job goes on") as error:
            job.result(timeout)
        assert isinstance(error.value, ResultTimeout)
    assert job.status() == "queued"


@pytest.mark.parametrize("age", ["young", "old"])
@pytest.mark.parametrize("state", ["waiting", "finished"])
def test_another_tenants_job_looks_like_a_missing_one(state, age, shared_redis: RedisServer, parked: str):
    """Whatever is asked, in whatever order, the answers do not tell whether the id exists; cancelling has no effect."""
    settings = Settings.load(overrides={"tenant_id": "globex", "queue.result_ttl_s": 0.05 if age == "old" else 60})
    with Client(shared_redis.url, tenant="acme") as acme, Client(shared_redis.url, settings=settings) as globex:
        job, missing = acme.submit(parked, INPUTS), new_job_id(parked)
        if state == "finished":
            job.cancel()
        if age == "old":
            made_ms = job_time_ms(missing) or 0
            wait_until(lambda: time.time() * 1000 > made_ms + 100, 5, "the ids are older than results are kept")
        assert _refusals(globex, job.id) == _refusals(globex, missing)
        assert acme.job(job.id).status() == ("cancelled" if state == "finished" else "queued")


def test_expired_result_is_gone_and_not_unknown(forgetful: Client, parked: str):
    """After its retention, every question says how long results are kept."""
    job = forgetful.submit(parked, INPUTS)
    job.cancel()

    def is_gone() -> PenstockError | None:
        try:
            forgetful.job(job.id).status()
        except PenstockError as error:
            return error
        return None

    gone = wait_until(is_gone, 5, "the record expires")
    assert isinstance(gone, ResultGone)
    assert str(gone).startswith(f"The result of job {job.id} is gone: the job ended longer ago than results are kept ")
    assert f"({RESULT_TTL_S:g} s)" in str(gone)
    again = forgetful.job(job.id)
    for ask in (job.status, again.status, again.result, lambda: list(again.stream()), again.cancel):
        with pytest.raises(ResultGone):
            ask()
    with pytest.raises(UnknownJob):
        forgetful.job(new_job_id(parked)).status()


def test_a_process_that_submits_loads_no_framework(shared_redis: RedisServer, parked: str):
    """Submitting, asking and withdrawing need neither torch nor Celery."""
    program = f"""
import sys
from penstock import Client
client = Client({shared_redis.url!r})
job = client.submit({parked!r}, {{"x": [[1, 2, 3, 4]]}})
assert job.status() == "queued" and job.cancel() == "cancelled"
print(sorted({{"torch", "transformers", "onnxruntime", "celery"}} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=180
    )
    assert done.stdout == "[]\n"
