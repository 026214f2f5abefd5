"""What is accepted, and when there is no room: priorities, limits, idempotency keys, the header. CF-008, CF-029."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from penstock import AsyncClient, AsyncJobHandle, Client, PriorityName
from penstock.registry.admission import JobBuilder, SpecCache
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import JobHeader, Keyring, open_job
from penstock.registry.errors import IdempotencyConflict, QueueFull, UnknownModel
from penstock.registry.package import ModelSpec
from penstock.registry.queues import Priority, stream_key
from penstock.registry.settings import Settings
from penstock.registry.tensors import decode
from tests.servers import RedisServer, wait_until

INPUTS = {"x": np.ones((1, 4), np.float32)}
OTHER = {"x": np.zeros((1, 4), np.float32)}
MAX_DEPTH = 5


def _queued(broker: RedisStreams, model: str) -> dict[str, int]:
    return {depth.priority.label: depth.jobs for depth in broker.depths(model)}


def _jobs(server: RedisServer, model: str) -> list[tuple[JobHeader, memoryview | bytes]]:
    with server.client() as client:
        entries = client.xrange(stream_key(model, Priority.NORMAL))
    return [open_job(fields[b"e"], Keyring.parse(None)) for _, fields in entries]


@pytest.fixture
def narrow(shared_redis: RedisServer) -> Iterator[Client]:
    """A client that fills a queue with five jobs."""
    settings = Settings.load(overrides={"queue.max_depth": MAX_DEPTH})
    with Client(shared_redis.url, settings=settings) as client:
        yield client


def test_names_that_nobody_serves_leave_nothing_in_the_cache(parked: str, broker: RedisStreams, tmp_path: Path):
    """A caller who asks for model after model, or version after version, fills no memory and drops no known spec."""
    cache, spec = SpecCache(tmp_path), broker.announced(parked).spec

    def fetch(model: str, version: str) -> bytes | None:
        return spec if (model, version) == (parked, "") else None

    known = cache.get(parked, None, fetch)
    for number in range(2000):
        for name, version in ((f"unknown{number}", None), (parked, f"9.{number}")):
            with pytest.raises(UnknownModel):
                cache.get(name, version, fetch)
    assert cache._specs.keys() == {(parked, "")}
    assert cache.get(parked, "1", fetch) is known


def test_each_priority_has_its_queue(client: Client, parked: str, broker: RedisStreams):
    """The four names, and no other, lead to four queues; normal is the default."""
    names: tuple[PriorityName, ...] = ("critical", "high", "normal", "low")
    for count, name in enumerate(names, 1):
        client.submit_many(parked, [INPUTS] * count, priority=name)
    client.submit(parked, INPUTS)
    assert _queued(broker, parked) == {"critical": 1, "high": 2, "normal": 4, "low": 4}


def test_one_submit_too_many_is_refused(narrow: Client, parked: str, broker: RedisStreams):
    """N + 1 single submits into a queue of N: exactly one QueueFull, which says when to retry, and none lost."""
    refused = []
    for _ in range(MAX_DEPTH + 1):
        try:
            narrow.submit(parked, INPUTS)
        except QueueFull as full:
            refused.append(full)
    assert len(refused) == 1
    assert str(refused[0]) == f"The queue is full (model {parked}). Expected a retry after 1.00 s"
    assert refused[0].retry_after_s == 1.0
    assert _queued(broker, parked)["normal"] == MAX_DEPTH
    narrow.submit(parked, INPUTS, priority="high")


def test_submit_many_waits_for_room(narrow: Client, parked: str, broker: RedisStreams):
    """Eight jobs into a queue of five: the call returns when three have left, and every job is accepted."""
    early = narrow.submit_many(parked, [INPUTS] * 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(narrow.submit_many, parked, [INPUTS] * MAX_DEPTH)
        wait_until(lambda: _queued(broker, parked)["normal"] == MAX_DEPTH, 5, "the queue is full")
        assert not waiting.done()
        assert all(job.cancel() == "cancelled" for job in early)
        late = waiting.result(180)
    assert len({job.id for job in late}) == MAX_DEPTH
    assert {job.status() for job in late} == {"queued"}


def test_submit_many_gives_up_in_time_and_names_what_was_accepted(narrow: Client, parked: str):
    """QueueFull after `timeout_s`, with the handles of the jobs that stay accepted."""
    with pytest.raises(QueueFull) as full:
        narrow.submit_many(parked, [INPUTS] * (MAX_DEPTH + 2), timeout_s=1.0)
    assert len(full.value.accepted) == MAX_DEPTH
    assert {job.status() for job in full.value.accepted} == {"queued"}  # type: ignore[attr-defined]


def test_asyncio_submit_many_waits_for_room_too(shared_redis: RedisServer, parked: str):
    """As the blocking client: it waits, or gives up in time and names what was accepted."""

    async def fill() -> None:
        settings = Settings.load(overrides={"queue.max_depth": MAX_DEPTH})
        async with AsyncClient(shared_redis.url, settings=settings) as client:
            with pytest.raises(QueueFull) as full:
                await client.submit_many(parked, [INPUTS] * (MAX_DEPTH + 2), timeout_s=1.0)
            assert len(full.value.accepted) == MAX_DEPTH
            waiting = asyncio.create_task(client.submit_many(parked, [INPUTS] * 2))
            for job in full.value.accepted[:2]:
                assert isinstance(job, AsyncJobHandle)
                assert await job.cancel() == "cancelled"
            assert len(await asyncio.wait_for(waiting, 120)) == 2

    asyncio.run(fill())


def test_one_tenant_cannot_fill_the_queue(shared_redis: RedisServer, parked: str):
    """A tenant at its limit of unfinished jobs is refused; another tenant is not."""
    settings = Settings.load(overrides={"queue.tenant_max_in_flight": 2})
    with Client(shared_redis.url, settings=settings) as client:
        first = client.submit(parked, INPUTS, tenant="acme")
        client.submit(parked, INPUTS, tenant="acme", priority="high")
        with pytest.raises(QueueFull, match="The tenant has reached its limit of jobs in flight"):
            client.submit(parked, INPUTS, tenant="acme", priority="critical")
        client.submit(parked, INPUTS, tenant="globex")
        assert first.cancel() == "cancelled"
        client.submit(parked, INPUTS, tenant="acme")


def test_equal_submits_under_one_key_are_one_job(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """Two clients, one idempotency key, the same inputs: one job, whatever their priorities and deadlines."""
    with Client(shared_redis.url) as one, Client(shared_redis.url) as two:
        first = one.submit(parked, INPUTS, idempotency_key="order-17")
        again = two.submit(parked, INPUTS, idempotency_key="order-17", priority="high", deadline_s=30)
    assert first.id == again.id
    assert sum(_queued(broker, parked).values()) == 1


def test_a_key_belongs_to_its_inputs_version_and_tenant(shared_redis: RedisServer, parked: str, broker: RedisStreams):
    """Other inputs or a fixed version under a known key conflict; another tenant has keys of its own."""
    with Client(shared_redis.url) as one, Client(shared_redis.url) as two:
        one.submit(parked, INPUTS, idempotency_key="order-17")
        for inputs, version in ((OTHER, None), (INPUTS, "1")):
            with pytest.raises(IdempotencyConflict) as conflict:
                two.submit(parked, inputs, version=version, idempotency_key="order-17")
            assert str(conflict.value) == (
                "The idempotency key belongs to a job with another version or other inputs. "
                "Expected the same inputs, or a new key"
            )
        assert two.submit(parked, OTHER, idempotency_key="order-17", tenant="globex").status() == "queued"
    assert sum(_queued(broker, parked).values()) == 2


def test_threads_share_a_client(client: Client, parked: str, broker: RedisStreams):
    """Eight threads at once: every submit is a job of its own."""
    start = threading.Barrier(8)

    def submit_some() -> list[str]:
        start.wait()
        return [client.submit(parked, INPUTS).id for _ in range(25)]

    with ThreadPoolExecutor(8) as pool:
        batches = [future.result() for future in [pool.submit(submit_some) for _ in range(8)]]
    assert len({job_id for ids in batches for job_id in ids}) == 200
    assert _queued(broker, parked)["normal"] == 200


def test_header_carries_what_the_caller_said(shared_redis: RedisServer, parked: str, monkeypatch: pytest.MonkeyPatch):
    """Tenant of the environment, trace, deadline, version, wanted outputs: read back from the queue itself."""
    monkeypatch.setenv("PENSTOCK_TENANT_ID", "acme")
    trace = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    with Client(shared_redis.url) as client:
        job = client.submit(parked, INPUTS, traceparent=trace, deadline_s=30, version="1", outputs=["z"])
        client.submit(parked, INPUTS, tenant="globex")
    assert client.tenant == job.tenant == "acme"
    (first, _), (second, _) = _jobs(shared_redis, parked)
    assert (first.id, first.tenant, first.traceparent, first.deadline_ms) == (job.id, "acme", trace, 30_000)
    assert (first.version, first.options.outputs, first.priority) == ("1", ("z",), "normal")
    assert (second.tenant, second.traceparent, second.deadline_ms, second.options.outputs) == ("globex", "", 0, ())


def test_inputs_travel_as_raw_bytes(client: Client, shared_redis: RedisServer, parked: str):
    """The body of an envelope is the tensor's little-endian bytes, and nested lists make the same ones."""
    values = np.arange(8, dtype=np.float32).reshape(2, 4)
    client.submit(parked, {"x": values})
    client.submit(parked, {"x": values.tolist()})
    with shared_redis.client() as redis:
        bodies = [
            open_job(fields[b"e"], Keyring.parse(None))
            for _, fields in redis.xrange(stream_key(parked, Priority.NORMAL))
        ]
    assert [bytes(body) for _, body in bodies] == [values.tobytes()] * 2
    np.testing.assert_array_equal(decode(bodies[0][0].content, bodies[0][1])["x"], values)


def test_submit_many_publishes_hundreds_in_one_call(client: Client, shared_redis: RedisServer, parked: str):
    """600 jobs reach the broker in three script calls."""
    client.submit(parked, INPUTS)
    with shared_redis.monitor() as commands:
        client.submit_many(parked, [INPUTS] * 600)
    assert sum(command.startswith("EVALSHA") for command in commands) == 3


def test_submits_of_one_tick_travel_together(shared_redis: RedisServer, parked: str):
    """A hundred coroutines that submit at once cost two script calls at most, not a hundred."""

    async def submit_at_once() -> list[str]:
        async with AsyncClient(shared_redis.url) as client:
            await client.submit(parked, INPUTS)
            with shared_redis.monitor() as commands:
                jobs = await asyncio.gather(*(client.submit(parked, INPUTS) for _ in range(100)))
            assert len({job.id for job in jobs}) == 100
            return commands

    commands = asyncio.run(submit_at_once())
    assert 1 <= sum(command.startswith("EVALSHA") for command in commands) <= 2


def test_numbers_of_another_dtype_are_sent_as_the_declared_one(caplog: pytest.LogCaptureFixture):
    """float64 for float32, and one text for a list of texts. The log names each input once, at DEBUG."""
    spec = ModelSpec.model_validate(
        {
            "name": "m",
            "version": "1",
            "format": "python",
            "entrypoint": "model:build",
            "inputs": [
                {"name": "x", "dtype": "float32", "shape": ["batch", 2]},
                {"name": "text", "dtype": "string", "shape": ["batch"], "optional": True},
            ],
            "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch"]}],
        }
    )
    builder = JobBuilder(tenant="acme", keyring=Keyring.parse(None), max_bytes=1000)
    inputs = {"x": np.array([[0.5, 1e-3]]), "text": "hello"}
    with caplog.at_level("DEBUG", "penstock.client"):
        jobs = [builder.build(spec, inputs), *builder.build_many(spec, [(inputs, None)] * 2)]
    for job in jobs:
        header, sent = open_job(job.sealed, Keyring.parse(None))
        arrays = decode(header.content, sent)
        assert arrays["x"].dtype == np.float32
        assert arrays["x"].tolist() == inputs["x"].astype(np.float32).tolist()  # type: ignore[attr-defined]
        assert arrays["text"].tolist() == ["hello"]
    told = [(record.getMessage(), record.__dict__["input"]) for record in caplog.records]
    assert told == [("input converted to the declared dtype", name) for name in ("x", "text")]
