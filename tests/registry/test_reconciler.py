"""Wanted versions in Redis: each new wish is followed once, by the workers of its model, and only if it is signed."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import redis

from registry.errors import BrokerUnavailable
from registry.reconciler import Reconciler, StateStore, Wish
from safety.keys import OperatorKey, PublicKeys
from tests.servers import RedisServer, wait_until


class Worker:
    """What a reconciler acts on: notes what it is told."""

    def __init__(self, *models: str) -> None:
        self.models = models
        self.told: list[tuple[str, str, str]] = []

    def may_serve(self, name: str) -> bool:
        return name in self.models

    def want(self, name: str, label: str, *, content_hash: str = "") -> None:
        self.told.append(("want", f"{name}/{label}", content_hash))

    def let_go_of(self, name: str, label: str) -> None:
        self.told.append(("let go", f"{name}/{label}", ""))

    def versions(self) -> Mapping[str, object]:
        return {name: {"1": {"state": "ready"}} for name in self.models}


@pytest.fixture
def prefix() -> str:
    """Keys of this test alone."""
    return f"state-{secrets.token_hex(4)}"


@pytest.fixture
def store(shared_redis: RedisServer, prefix: str) -> Iterator[StateStore]:
    """A store under that prefix."""
    store = StateStore.from_url(shared_redis.url, prefix)
    yield store
    store.close()


def test_a_wish_is_followed_once_until_it_is_made_again(store: StateStore):
    """Sweeps repeat nothing; a new record of the same wish is a new wish; what is not wanted any more is let go."""
    worker = Worker("minilm")
    reconciler = Reconciler(store, worker, worker="w", interval_s=5)
    store.put(Wish("minilm", "2", content_hash="ab", at=1))
    store.put(Wish("other", "1", at=1))
    for _ in range(3):
        reconciler.sweep()
    assert worker.told == [("want", "minilm/2", "ab")]
    store.put(Wish("minilm", "2", content_hash="ab", at=2))
    reconciler.sweep()
    store.put(Wish("minilm", "2", is_wanted=False, at=3))
    reconciler.sweep()
    assert worker.told[1:] == [("want", "minilm/2", "ab"), ("let go", "minilm/2", "")]


def test_keys_carry_the_prefix_and_tell_what_is_loaded(store: StateStore, shared_redis: RedisServer, prefix: str):
    """IN-017, IN-018: wanted and loaded versions, under the prefix of the settings; a worker that leaves is gone."""
    reconciler = Reconciler(store, Worker("minilm"), worker="gpu0@here", interval_s=60)
    store.put(Wish("minilm", "1"))
    reconciler.start()
    client = redis.Redis.from_url(shared_redis.url)
    wait_until(lambda: client.hlen(f"{prefix}:loaded"), 5, "the first sweep")
    assert sorted(client.scan_iter(f"{prefix}*")) == [f"{prefix}:loaded".encode(), f"{prefix}:wanted".encode()]
    assert store.loaded()["gpu0@here"]["models"] == {"minilm": {"1": {"state": "ready"}}}
    reconciler.stop()
    assert client.hlen(f"{prefix}:loaded") == 0
    client.close()


def test_sweeps_come_at_the_interval_and_when_nudged(store: StateStore):
    """IN-020: two wishes made in between are met at the next sweep; a nudge does not wait for it."""
    worker = Worker("minilm")
    reconciler = Reconciler(store, worker, worker="w", interval_s=0.4)
    reconciler.start()
    try:
        wait_until(lambda: store.loaded(), 5, "the first sweep")
        store.put(Wish("minilm", "2", at=1))
        begun = time.monotonic()
        wait_until(lambda: worker.told, 5, "the next sweep")
        assert time.monotonic() - begun < 2 * 0.4
    finally:
        reconciler.stop()
    patient = Reconciler(store, worker, worker="w", interval_s=600)
    patient.start()
    try:
        wait_until(lambda: len(worker.told) == 2, 5, "its first sweep")
        store.put(Wish("minilm", "2", at=2))
        patient.nudge()
        wait_until(lambda: len(worker.told) == 3, 5, "the nudged sweep")
    finally:
        patient.stop()


def test_only_signed_wishes_are_followed_where_signatures_are_asked_for(store: StateStore, tmp_path: Path):
    """Unsigned, of a stranger, or moved to another field: none of them loads anything."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    worker = Worker("minilm", "mlp")
    reconciler = Reconciler(
        store, worker, worker="w", interval_s=5, verify=PublicKeys.parse(operator.public_text).verify
    )
    store.put(Wish("minilm", "1"))
    store.put(Wish("minilm", "2"), stranger.sign)
    store._redis.hset(store._wanted, "mlp/1", Wish("minilm", "3").seal(operator.sign))
    store._redis.hset(store._wanted, "mlp/2", b"no record")
    reconciler.sweep()
    assert worker.told == []
    store.put(Wish("minilm", "1"), operator.sign)
    reconciler.sweep()
    assert worker.told == [("want", "minilm/1", "")]


def test_a_store_that_is_away_unloads_nothing(redis_server: RedisServer, prefix: str):
    """IN-007: sweeps fail, the worker keeps what it has, and goes on sweeping when the store is back, emptied."""
    worker = Worker("minilm")
    store = StateStore.from_url(redis_server.url, prefix)
    store.put(Wish("minilm", "1"))
    reconciler = Reconciler(store, worker, worker="w", interval_s=0.1)
    reconciler.start()
    wait_until(lambda: worker.told, 5, "the first sweep")
    redis_server.kill()
    with pytest.raises(BrokerUnavailable):
        store.wishes()
    redis_server.start()
    wait_until(lambda: "w" in StateStore.from_url(redis_server.url, prefix).loaded(), 10, "it sweeps again")
    reconciler.stop()
    assert worker.told == [("want", "minilm/1", "")]
    assert not [thread for thread in threading.enumerate() if thread.name == "reconciler"]
