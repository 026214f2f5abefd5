"""Wanted versions in Redis: each new wish is followed once, by the workers of its model, and only if it is signed."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import redis

from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import BrokerUnavailable
from penstock.safety.keys import OperatorKey, PublicKeys
from penstock.workers.versions.reconciler import Reconciler
from tests.servers import RedisServer, wait_until


class Worker:
    """What a reconciler acts on: notes what it is told."""

    def __init__(self, *models: str) -> None:
        self.models = models
        self.told: list[tuple[str, str, str]] = []

    def may_serve(self, name: str) -> bool:
        return name in self.models

    def request_load(self, name: str, label: str, *, content_hash: str = "") -> None:
        self.told.append(("want", f"{name}/{label}", content_hash))

    def request_unload(self, name: str, label: str, *, content_hash: str = "") -> None:
        self.told.append(("let go", f"{name}/{label}", content_hash))

    def described(self) -> Mapping[str, object]:
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
    store.put(DesiredVersion("minilm", "2", content_hash="ab", at=1))
    store.put(DesiredVersion("other", "1", at=1))
    for _ in range(3):
        reconciler.sweep()
    assert worker.told == [("want", "minilm/2", "ab")]
    store.put(DesiredVersion("minilm", "2", content_hash="ab", at=2))
    reconciler.sweep()
    store.put(DesiredVersion("minilm", "2", is_wanted=False, content_hash="ab", at=3))
    reconciler.sweep()
    assert worker.told[1:] == [("want", "minilm/2", "ab"), ("let go", "minilm/2", "ab")]


def test_keys_carry_the_prefix_and_tell_what_is_loaded(store: StateStore, shared_redis: RedisServer, prefix: str):
    """IN-017, IN-018: wanted and loaded versions, under the prefix of the settings; a worker that leaves is gone."""
    reconciler = Reconciler(store, Worker("minilm"), worker="gpu0@here", interval_s=60)
    store.put(DesiredVersion("minilm", "1"))
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
        store.put(DesiredVersion("minilm", "2", at=1))
        wait_until(lambda: worker.told, 30, "the next sweep")
    finally:
        reconciler.stop()
    patient = Reconciler(store, worker, worker="w", interval_s=600)
    patient.start()
    try:
        wait_until(lambda: len(worker.told) == 2, 5, "its first sweep")
        store.put(DesiredVersion("minilm", "2", at=2))
        patient.nudge()
        wait_until(lambda: len(worker.told) == 3, 5, "the nudged sweep")
    finally:
        patient.stop()


def test_wishes_that_are_gone_are_forgotten(store: StateStore):
    """Records come and go for as long as a worker lives; what is kept of them is what lies in the store."""
    worker = Worker("minilm")
    reconciler = Reconciler(store, worker, worker="w", interval_s=5)
    for number in range(3):
        store._redis.delete(store._wanted)
        store.put(DesiredVersion("minilm", f"{number}", at=1))
        reconciler.sweep()
    assert set(reconciler._followed) == {"minilm/2"}
    assert [reference for _, reference, _ in worker.told] == ["minilm/0", "minilm/1", "minilm/2"]


def test_a_stop_is_not_lost_in_a_sweep(store: StateStore):
    """It comes while the first sweep reports: the thread ends then, and not an interval later."""
    reconciler: Reconciler

    class Stopping(Worker):
        def described(self) -> Mapping[str, object]:
            reconciler.ask_to_stop()
            return {}

    reconciler = Reconciler(store, Stopping("minilm"), worker="w", interval_s=600)
    reconciler.start()
    reconciler._thread.join(5)
    assert not reconciler._thread.is_alive()
    assert store.loaded() == {}


def test_a_store_that_hangs_does_not_hold_up_the_end():
    """It takes connections and says nothing: the sweep under way is left to itself."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        store = StateStore.from_url(f"redis://127.0.0.1:{hanging.getsockname()[1]}/0", "state")
        reconciler = Reconciler(store, Worker("minilm"), worker="w", interval_s=600)
        reconciler.start()
        connection, _ = hanging.accept()
        reconciler.stop()
        assert reconciler._thread.is_alive(), "the stop did not wait for it"
        connection.close()
    # Refused from here on, so the thread ends, too.
    reconciler._thread.join(5)
    assert not reconciler._thread.is_alive()


def test_only_signed_wishes_are_followed_where_signatures_are_asked_for(store: StateStore, tmp_path: Path):
    """Unsigned, of a stranger, or moved to another field: none of them loads anything."""
    operator = OperatorKey.generate(tmp_path / "operator.pem")
    stranger = OperatorKey.generate(tmp_path / "stranger.pem")
    worker = Worker("minilm", "mlp")
    reconciler = Reconciler(
        store, worker, worker="w", interval_s=5, verify=PublicKeys.parse(operator.public_text).verify
    )
    store.put(DesiredVersion("minilm", "1"))
    store.put(DesiredVersion("minilm", "2"), stranger.sign)
    store._redis.hset(store._wanted, "mlp/1", DesiredVersion("minilm", "3").seal(operator.sign))
    store._redis.hset(store._wanted, "mlp/2", b"no record")
    reconciler.sweep()
    assert worker.told == []
    store.put(DesiredVersion("minilm", "1"), operator.sign)
    reconciler.sweep()
    assert worker.told == [("want", "minilm/1", "")]


def test_a_store_that_is_away_unloads_nothing(redis_server: RedisServer, prefix: str):
    """IN-007: sweeps fail, the worker keeps what it has, and goes on sweeping when the store is back, emptied."""
    worker = Worker("minilm")
    store = StateStore.from_url(redis_server.url, prefix)
    store.put(DesiredVersion("minilm", "1"))
    reconciler = Reconciler(store, worker, worker="w", interval_s=0.1)
    reconciler.start()
    wait_until(lambda: worker.told, 5, "the first sweep")
    redis_server.kill()
    with pytest.raises(BrokerUnavailable):
        store.desired()
    redis_server.start()
    wait_until(lambda: "w" in StateStore.from_url(redis_server.url, prefix).loaded(), 10, "it sweeps again")
    reconciler.stop()
    assert worker.told == [("want", "minilm/1", "")]
    assert not [thread for thread in threading.enumerate() if thread.name == "reconciler"]
