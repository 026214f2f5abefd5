"""The shared cache before the queue: a hit is an ended job and no message, a broken cache is a miss."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final

import numpy as np
import pytest

from penstock import AsyncClient, Client
from penstock.producers.cached_answers import CachedAnswers
from penstock.producers.job_state import JobInfo
from penstock.registry.admission import JobBuilder, SubmitOptions
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.deployment import Deployment
from penstock.registry.envelope import Keyring, open_job
from penstock.registry.errors import ConfigurationError, IdempotencyConflict, InvalidInput, UnknownJob
from penstock.registry.package import ModelSpec
from penstock.registry.queues import stream_keys
from penstock.registry.settings import Settings
from penstock.registry.tensors import encode
from penstock.safety.cache_entry import EXACT, CacheEntry, EntryKey, key_of, pack
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l3 import L3Cache, L3CacheConfig
from penstock.workers.cache.tier import Put
from tests.servers import RedisServer, free_port, wait_until

KEYS: Final = DataKeys([b"1" * 32])
HASH: Final = "a" * 64
INPUTS: Final = {"x": np.arange(4, dtype=np.float32).reshape(1, 4)}
OTHER: Final = {"x": np.ones((1, 4), np.float32)}
ANSWER: Final = {"y": np.full((1, 4), 7, np.float32), "z": np.full(1, 8, np.float32)}


def _spec(model: str, version: str = "1", **fields: Any) -> ModelSpec:
    return ModelSpec.model_validate(
        {
            "name": model,
            "version": version,
            "format": "python",
            "entrypoint": "model:build",
            "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
            "outputs": [
                {"name": "y", "dtype": "float32", "shape": ["batch", 4]},
                {"name": "z", "dtype": "float32", "shape": ["batch"]},
            ],
            **fields,
        }
    )


class Fleet:
    """A broker with one promoted model and no worker; the same server has the shared cache."""

    def __init__(self, server: RedisServer, model: str) -> None:
        self.server = server
        self.model = model
        self.prefix = f"{model}:"
        self._epoch = 0
        self._cache = L3Cache(L3CacheConfig(redis_url=server.url, key_prefix=self.prefix, socket_timeout=30), KEYS)

    def promote(self, version: str = "1", content_hash: str = HASH, **fields: Any) -> None:
        """Makes a version the active one."""
        self._epoch += 1
        spec = _spec(self.model, version, **fields)
        with closing(RedisStreams.from_url(self.server.url)) as broker:
            record = Deployment(self._epoch, self.model, version, content_hash).seal()
            broker.activate(self.model, self._epoch, record, version, spec.to_json())

    def settings(self, **values: Any) -> Settings:
        """Those of a client that looks into the cache."""
        return Settings.load(
            overrides={
                "cache.producer_lookup": True,
                "cache.redis_url": self.server.url,
                "cache.key_prefix": self.prefix,
                "cache.privacy_mode": "persisted_encrypted",
                "privacy.mode": "persisted_encrypted",
                "l2_encryption_key": (b"1" * 32).hex(),
                **values,
            }
        )

    def answer(
        self,
        inputs: dict[str, Any] = INPUTS,
        *,
        version: str = "1",
        content_hash: str = HASH,
        tenant: str = "default",
        form: str = EXACT,
        options: SubmitOptions | None = None,
        value: bytes | None = None,
    ) -> None:
        """Puts an answer into the cache, under the key that a worker makes of what it receives."""
        builder = JobBuilder(tenant="default", keyring=Keyring.parse(None), max_bytes=1 << 20)
        sealed = builder.build(_spec(self.model, version), inputs, options or SubmitOptions()).sealed
        digest = key_of(*open_job(sealed, Keyring.parse(None)), version, tenant=tenant)
        packed = pack(CacheEntry(*encode(ANSWER), content_hash, form)) if value is None else value
        assert self._cache.put_many([Put(EntryKey(content_hash, digest, tenant), packed, 600)]) == 1

    @property
    def queued(self) -> int:
        """The messages in the queues of the model."""
        with self.server.client() as client:
            return sum(client.xlen(key) for key in stream_keys(self.model))

    def close(self) -> None:
        """Closes the cache."""
        self._cache.close()


@pytest.fixture
def fleet(shared_redis: RedisServer, slot: str) -> Iterator[Fleet]:
    """A fleet with version 1 in production."""
    with closing(Fleet(shared_redis, slot)) as fleet:
        fleet.promote()
        yield fleet


@pytest.fixture
def client(fleet: Fleet) -> Iterator[Client]:
    """A client that looks into the cache."""
    with Client(fleet.server.url, settings=fleet.settings()) as client:
        yield client


def _check(info: JobInfo) -> None:
    assert info.is_cached
    assert (info.status, info.version, info.content_hash) == ("completed", "1", HASH)
    assert (info.worker, info.attempt, info.batch_size) == ("", 0, 0)


def test_a_hit_costs_no_message(fleet: Fleet, client: Client):
    """The handle is that of an ended job, and everything that it says is true."""
    fleet.answer()
    job = client.submit(fleet.model, INPUTS)
    assert fleet.queued == 0
    assert job.status() == "completed"
    result = job.result(timeout=0)
    np.testing.assert_array_equal(result["y"], ANSWER["y"])
    np.testing.assert_array_equal(result["z"], ANSWER["z"])
    _check(job.info())
    assert job.cancel() == "too_late"
    (event,) = job.stream()
    assert (event.type, event.seq) == ("completed", 3)
    np.testing.assert_array_equal(event.data["y"], ANSWER["y"])
    assert list(job.stream(after=3)) == []
    assert list(client.as_completed([job])) == [job]
    assert len(client.gather([job])) == 1
    # The broker never had it.
    with Client(fleet.server.url) as other, pytest.raises(UnknownJob):
        other.job(job.id).status()


def test_async_hits_cost_no_message(fleet: Fleet):
    """The same for AsyncClient; the submits of one turn are one look-up."""
    fleet.answer()

    async def run() -> list[str]:
        async with AsyncClient(fleet.server.url, settings=fleet.settings()) as client:
            job = await client.submit(fleet.model, INPUTS)
            assert await job.status() == "completed"
            np.testing.assert_array_equal((await job.result(timeout=0))["y"], ANSWER["y"])
            _check(await job.info())
            assert await job.cancel() == "too_late"
            assert [event.type async for event in job.stream()] == ["completed"]
            assert [each.id async for each in client.as_completed([job])] == [job.id]
            with fleet.server.monitor() as commands:
                jobs = await asyncio.gather(*(client.submit(fleet.model, INPUTS) for _ in range(20)))
            assert all(each._state.record is not None for each in jobs)
            assert fleet.queued == 0
            many = await client.submit_many(fleet.model, [INPUTS, OTHER, INPUTS])
            assert [each._state.was_queued for each in many] == [False, True, False]
            return [command for command in commands if command.startswith("MGET") and fleet.prefix in command]

    assert len(asyncio.run(run())) == 1
    assert fleet.queued == 1


def test_a_miss_is_queued(fleet: Fleet, client: Client):
    """Other inputs, and all inputs while the cache is empty."""
    assert client.submit(fleet.model, INPUTS)._state.record is None
    fleet.answer()
    assert client.submit(fleet.model, OTHER)._state.record is None
    assert fleet.queued == 2


def test_many_are_one_look_up(fleet: Fleet, client: Client):
    """The handles are in the order of the items, hits and misses mixed."""
    fleet.answer()
    client.submit(fleet.model, INPUTS)
    with fleet.server.monitor() as commands:
        jobs = client.submit_many(fleet.model, [OTHER, INPUTS, OTHER, INPUTS, INPUTS])
    assert [job._state.was_queued for job in jobs] == [True, False, True, False, False]
    assert len({job.id for job in jobs}) == 5
    assert fleet.queued == 2
    assert len([each for each in commands if each.startswith("MGET") and fleet.prefix in each]) == 1


def test_map_uses_the_cache(fleet: Fleet, client: Client):
    """When every item is a hit, a map ends without a worker."""
    fleet.answer()
    results = client.map(fleet.model, [INPUTS] * 3)
    assert fleet.queued == 0
    assert [float(result["z"][0]) for result in results] == [8.0] * 3


def test_errors_name_the_item(fleet: Fleet, client: Client):
    """A bad item is refused with its own number, and nothing is written, as without a cache."""
    fleet.answer()
    with pytest.raises(InvalidInput, match="Item 2: "):
        client.submit_many(fleet.model, [INPUTS, OTHER, {"x": "bad"}])
    with pytest.raises(InvalidInput):
        client.submit(fleet.model, {"x": "bad"})
    assert fleet.queued == 0


def test_refused_items_of_a_map_keep_their_places(fleet: Fleet, client: Client):
    """Hits behind a bad item belong to their own items."""
    fleet.answer()
    first, second = client.map(fleet.model, [{"x": "bad"}, INPUTS], on_error="return")
    assert isinstance(first, InvalidInput)
    assert float(second["z"][0]) == 8.0


@pytest.mark.parametrize(
    "options",
    [{"idempotency_key": "k"}, {"webhook": "https://example.org/hook"}, {"outputs": ["y"]}, {"tenant": "other"}],
    ids=["idempotency key", "webhook", "other outputs", "other tenant"],
)
def test_other_jobs_are_queued(fleet: Fleet, client: Client, options: dict[str, Any]):
    """Jobs with a key or a webhook are not looked up; other outputs and tenants have answers of their own."""
    fleet.answer()
    client.submit(fleet.model, INPUTS, **options)
    assert fleet.queued == 1


def test_requested_outputs_are_part_of_the_question(fleet: Fleet, client: Client):
    """Deadline, priority and trace are not."""
    fleet.answer()
    client.submit(fleet.model, INPUTS, deadline_s=60, priority="high", traceparent=f"00-{'a' * 32}-{'b' * 16}-01")
    assert fleet.queued == 0


def test_tenants_share_answers_on_request(fleet: Fleet):
    """With cache_tenant_isolation off, the answers belong to nobody (CF-024)."""
    settings = fleet.settings(**{"privacy.cache_tenant_isolation": False})
    fleet.answer(tenant="")
    with Client(fleet.server.url, tenant="other", settings=settings) as client:
        assert client.submit(fleet.model, INPUTS).tenant == "other"
    assert fleet.queued == 0


def test_the_named_version_is_looked_up_if_active(fleet: Fleet, client: Client):
    """The content of another version is not known to a client."""
    fleet.answer()
    client.submit(fleet.model, INPUTS, version="1")
    assert fleet.queued == 0
    with closing(RedisStreams.from_url(fleet.server.url)) as broker:
        broker.put_spec(fleet.model, _spec(fleet.model, "2").to_json(), "2")
    fleet.answer(version="2")
    client.submit(fleet.model, INPUTS, version="2")
    assert fleet.queued == 1


def test_a_promotion_holds_for_the_next_job(fleet: Fleet, client: Client):
    """After a second at the latest, answers of the former version are not used any more."""
    fleet.answer()
    client.submit(fleet.model, INPUTS)
    fleet.promote("2", "b" * 64)
    wait_until(lambda: client.submit(fleet.model, INPUTS)._state.was_queued, 30, "the former answer is not used")


def test_the_active_version_is_kept_for_a_second():
    """Not longer, whatever the client does: a fake clock."""
    now = [100.0]
    cached = CachedAnswers(None, None, isolates_tenants=True, clock=lambda: now[0])  # type: ignore[arg-type]  # unused
    assert cached.is_due("m")
    cached.note("m", b"", cached.now())
    now[0] += 0.99
    assert not cached.is_due("m")
    now[0] += 0.01
    assert cached.is_due("m")


def test_other_content_under_one_label_is_queued(fleet: Fleet, client: Client):
    """The record names the content, and the answers of other content are in another group."""
    fleet.answer(content_hash="c" * 64)
    client.submit(fleet.model, INPUTS)
    assert fleet.queued == 1


def _foreign(fleet: Fleet) -> bytes:
    return pack(CacheEntry(*encode(ANSWER), "c" * 64, EXACT))


def _misfit(fleet: Fleet) -> bytes:
    content, body = encode(ANSWER)
    return pack(CacheEntry(content, body[:-1], HASH, EXACT))


@pytest.mark.parametrize(
    "value",
    [lambda fleet: b"", lambda fleet: b"not an entry", _foreign, _misfit],
    ids=["empty", "no entry", "other content", "cut body"],
)
def test_unusable_entries_are_misses(fleet: Fleet, client: Client, value: Callable[[Fleet], bytes]):
    """No entry makes a submit or a result fail."""
    fleet.answer(value=value(fleet))
    client.submit(fleet.model, INPUTS)
    assert fleet.queued == 1


def test_other_forms_are_not_offered(fleet: Fleet, client: Client):
    """Only answers within the tolerance of the model as it was built."""
    fleet.answer(form="bf16")
    client.submit(fleet.model, INPUTS)
    assert fleet.queued == 1


def test_models_that_do_not_repeat_are_queued(fleet: Fleet):
    """A model that is not deterministic has no cached answers."""
    fleet.promote("1", HASH, deterministic=False)
    fleet.answer()
    with Client(fleet.server.url, settings=fleet.settings()) as client:
        client.submit(fleet.model, INPUTS)
    assert fleet.queued == 1


def test_without_a_promotion_jobs_are_queued(shared_redis: RedisServer, slot: str):
    """Then no record says which content is active."""
    with closing(Fleet(shared_redis, slot)) as fleet:
        with closing(RedisStreams.from_url(shared_redis.url)) as broker:
            broker.put_spec(slot, _spec(slot).to_json())
        fleet.answer()
        with Client(shared_redis.url, settings=fleet.settings()) as client:
            client.submit(slot, INPUTS)
        assert fleet.queued == 1


def test_a_cache_that_is_away_is_a_miss(fleet: Fleet):
    """Both clients queue their jobs, and ask the cache once."""
    settings = fleet.settings(**{"cache.redis_url": f"redis://127.0.0.1:{free_port()}/0"})
    with Client(fleet.server.url, settings=settings) as client:
        for _ in range(3):
            client.submit(fleet.model, INPUTS)
        client.submit_many(fleet.model, [INPUTS] * 3)

    async def run() -> None:
        async with AsyncClient(fleet.server.url, settings=settings) as client:
            await client.submit(fleet.model, INPUTS)
            await client.submit_many(fleet.model, [INPUTS] * 3)

    asyncio.run(run())
    assert fleet.queued == 10


@pytest.mark.timeout(300)
def test_a_frozen_cache_is_a_miss(fleet: Fleet, redis_server: RedisServer):
    """The submit goes on after a short time, and the next ones do not wait at all."""
    redis_server.pause()
    settings = fleet.settings(**{"cache.redis_url": redis_server.tcp_url, "cache.socket_timeout_s": 3600})
    with Client(fleet.server.url, settings=settings) as client:
        for _ in range(3):
            client.submit(fleet.model, INPUTS)
    assert fleet.queued == 3


def test_off_by_default(fleet: Fleet):
    """Without the setting no client looks into the cache."""
    fleet.answer()
    with Client(fleet.server.url, settings=fleet.settings(**{"cache.producer_lookup": False})) as client:
        client.submit(fleet.model, INPUTS)
    assert fleet.queued == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"cache.redis_url": ""}, "without a shared cache"),
        ({"privacy.mode": "ephemeral", "cache.privacy_mode": "ephemeral"}, "in this privacy mode"),
        ({"cache.privacy_mode": "hashes_only"}, "in this privacy mode"),
        ({"l2_encryption_key": None}, "PENSTOCK_L2_ENCRYPTION_KEY"),
        ({"privacy.encrypt_at_rest": False, "cache.redis_url": "redis://127.0.0.1:1/0"}, "without TLS"),
    ],
)
def test_contradicting_settings_are_told(fleet: Fleet, values: dict[str, Any], expected: str):
    """The client is not made, and the error says what was expected."""
    with pytest.raises(ConfigurationError, match=expected) as told:
        Client(fleet.server.url, settings=fleet.settings(**values))
    assert "Expected" in str(told.value)


def test_accepted_handles_include_hits(fleet: Fleet):
    """When the queue is full, the error carries the jobs that were accepted and those that have ended, in order."""
    from penstock.registry.errors import QueueFull

    fleet.answer()
    with Client(fleet.server.url, settings=fleet.settings(**{"queue.max_depth": 1})) as client:
        with pytest.raises(QueueFull) as full:
            client.submit_many(fleet.model, [INPUTS, OTHER, OTHER, INPUTS], timeout_s=0)
        accepted: Any = full.value.accepted
    assert [job._state.was_queued for job in accepted] == [False, True, False]


def test_a_conflict_names_the_item(fleet: Fleet, client: Client):
    """Hits before it count, too."""
    fleet.answer()
    client.submit(fleet.model, OTHER, idempotency_key="k")
    third = {"x": np.zeros((1, 4), np.float32)}
    with pytest.raises(IdempotencyConflict, match="Item 1: "):
        client.submit_many(fleet.model, [INPUTS, third], idempotency_keys=[None, "k"])
