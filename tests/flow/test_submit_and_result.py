"""SH-006, AR-034: a job goes in, its result comes out once, and can be read from anywhere that may."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from penstock import AsyncClient, Client, JobInfo
from penstock.registry.envelope import Keyring, open_result
from penstock.registry.errors import Expired, IdempotencyConflict, ModelError, ResultTimeout
from penstock.registry.queues import job_time_ms, record_key
from tests.flow.conftest import Fleet
from tests.packages import recorded_forwards
from tests.servers import ROOT, wait_until

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def _row(number: float) -> dict[str, np.ndarray]:
    return {"x": np.array([[number, 0, 0, 0]], np.float32)}


def test_result_is_the_models_answer(client: Client):
    """Arrays come back with their names, shapes and dtypes; asking again gives the same."""
    rng = np.random.default_rng(7)
    # A job of more rows than a batch runs in slices, and a large result travels by its id.
    for rows in (1, 3, 2000):
        x = rng.normal(size=(rows, 4)).astype(np.float32)
        job = client.submit("double", {"x": x})
        for _ in range(2):
            outputs = job.result(180)
            assert list(outputs) == ["y"]
            assert outputs["y"].dtype == np.float32
            np.testing.assert_array_equal(outputs["y"], x * 2)
        assert job.status() == "completed"


def test_asyncio_client_gives_the_same(fleet: Fleet):
    """Two hundred coroutines at once: each gets its own answer."""

    async def ask(client: AsyncClient, number: int) -> float:
        job = await client.submit("double", _row(number))
        assert await client.job(job.id).status() in ("queued", "running", "completed")
        return float((await job.result(180))["y"][0, 0])

    async def ask_all() -> list[float]:
        async with AsyncClient(fleet.server.url) as client:
            return await asyncio.gather(*(ask(client, number) for number in range(200)))

    assert asyncio.run(ask_all()) == [number * 2 for number in range(200)]


def test_threads_get_their_own_answers(client: Client):
    """Eight threads on one client: no answer goes to another's job."""

    def ask(thread: int) -> bool:
        numbers = [thread * 1000 + each for each in range(25)]
        jobs = [client.submit("double", _row(number)) for number in numbers]
        return [float(job.result(180)["y"][0, 0]) for job in jobs] == [number * 2 for number in numbers]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(8)))


def test_context_flows_from_header_to_result(client: Client, fleet: Fleet):
    """Tenant and trace of the request stand in the sealed result, with the worker, version and attempt."""
    job = client.submit("double", _row(1), tenant="acme", traceparent=TRACE)
    job.result(180)
    with fleet.server.client() as redis:
        record = redis.get(record_key(job.id))
    header, _ = open_result(record[2:], Keyring.parse(None))
    assert (header.context.tenant, header.context.traceparent) == ("acme", TRACE)
    assert (header.id, header.worker, header.version, header.attempt) == (job.id, "fleet@test", "1", 1)
    assert header.timings.compute_ms > 0


def test_clients_are_told_who_answered(client: Client, fleet: Fleet):
    """Version, content, worker, batch and timings, of an answer and of a failure; the asyncio client says the same."""

    async def ask(job_id: str) -> JobInfo:
        async with AsyncClient(fleet.server.url) as other:
            return await other.job(job_id).info(10)

    answered, failed = client.submit("double", _row(0.125)), client.submit("raiser", _row(-1))
    for job, status in ((answered, "completed"), (failed, "failed")):
        info = job.info(10)
        assert (info.status, info.version, info.worker, info.attempt) == (status, "1", "fleet@test", 1)
        assert len(info.content_hash) == 64
        assert info.batch_size >= 1
        assert asyncio.run(ask(job.id)) == info
    assert answered.info().content_hash != failed.info().content_hash
    assert answered.info().compute_ms > 0
    with pytest.raises(ResultTimeout):
        client.submit("napper", _row(0.125)).info(0)


def test_result_is_read_in_another_process(client: Client, fleet: Fleet):
    """An id is enough, before the job has ended and after, and the job may be awaited there."""
    job = client.submit("napper", _row(21))
    program = f"""
from penstock import Client
job = Client({fleet.server.url!r}).job({job.id!r})
print(job.result(180)["y"][0, 0], job.status(), [event.type for event in job.stream()])
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=180
    )
    assert done.stdout == "42.0 completed ['queued', 'started', 'completed']\n"


@pytest.mark.parametrize("is_first_running", [True, False], ids=["while the first runs", "after it has ended"])
def test_equal_submits_of_two_clients_run_once(is_first_running, fleet: Fleet):
    """One idempotency key in two clients: one forward, the same result for both; other inputs conflict."""
    number = 7001.0 + is_first_running
    key = f"order-{number}"
    with Client(fleet.server.url) as one, Client(fleet.server.url) as two:
        first = one.submit("recorder", _row(number), idempotency_key=key)
        if not is_first_running:
            first.result(180)
        again = two.submit("recorder", _row(number), idempotency_key=key)
        assert again.id == first.id
        assert float(again.result(180)["y"][0, 0]) == float(first.result(180)["y"][0, 0]) == number * 2
        with pytest.raises(IdempotencyConflict):
            two.submit("recorder", _row(number + 0.5), idempotency_key=key)
    assert [rows for rows in recorded_forwards(fleet.forward_log) if number in rows] == [[number]]


def test_failing_job_says_why_and_spares_its_neighbours(client: Client):
    """A model that raises for one row of a batch: that job fails with class and text, the others succeed."""
    jobs = client.submit_many("raiser", [_row(-1 if number == 5 else number) for number in range(16)])
    for number, job in enumerate(jobs):
        if number == 5:
            with pytest.raises(ModelError, match="ValueError: a negative row"):
                job.result(180)
            assert job.status() == "failed"
        else:
            assert job.result(180)["y"][0, 0] == number * 2


def test_expired_job_never_runs(client: Client, fleet: Fleet):
    """A deadline that passes while the job waits: it ends as expired, and no forward sees it."""
    fleet.worker.freeze()
    try:
        job = client.submit("recorder", _row(666), deadline_s=0.05)
        patient = client.submit("recorder", _row(667), deadline_s=60)
        # The broker accepts it some time after its id was made.
        wait_until(lambda: _age_ms(fleet, job.id) > 500, 5, "the deadline passes")
    finally:
        fleet.worker.thaw()
    with pytest.raises(Expired, match="deadline"):
        job.result(180)
    assert job.status() == "expired"
    assert [event.type for event in job.stream()] == ["queued", "expired"]
    assert patient.result(180)["y"][0, 0] == 667 * 2
    assert not [rows for rows in recorded_forwards(fleet.forward_log) if 666 in rows]


def _age_ms(fleet: Fleet, job_id: str) -> float:
    with fleet.server.client() as redis:
        seconds, micros = redis.time()
    return float(seconds * 1000 + micros / 1000 - (job_time_ms(job_id) or 0))
