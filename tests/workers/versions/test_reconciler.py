"""Requested versions in Redis: the workers of a model follow each new signed record once."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest
import redis

from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import BrokerUnavailable
from penstock.safety.operator_key import OperatorKey, PublicKeys
from penstock.workers.versions.reconciler import Reconciler
from tests.servers import RedisServer, wait_until


class Worker:
    """The target of a reconciler; it notes each call."""

    def __init__(self, *models: str) -> None:
        self.models = models
        self.calls: list[tuple[str, str, str]] = []

    def may_serve(self, name: str) -> bool:
        return name in self.models

    def request_load(self, name: str, label: str, *, content_hash: str = "") -> None:
        self.calls.append(("load", f"{name}/{label}", content_hash))

    def request_unload(self, name: str, label: str, *, content_hash: str = "") -> None:
        self.calls.append(("unload", f"{name}/{label}", content_hash))

    def described(self) -> Mapping[str, object]:
        return {name: {"1": {"state": "ready"}} for name in self.models}


@pytest.fixture
def prefix() -> str:
    """A key prefix that no other test uses."""
    return f"state-{secrets.token_hex(4)}"


@pytest.fixture
def store(shared_redis: RedisServer, prefix: str) -> Iterator[StateStore]:
    """A store under that prefix."""
    store = StateStore.from_url(shared_redis.url, prefix)
    yield store
    store.close()


def test_a_record_is_followed_once_until_it_is_written_again(store: StateStore):
    """Sweeps repeat no request; a new record of the same version is a new request; a released version is unloaded."""
    worker = Worker("minilm")
    reconciler = Reconciler(store, worker, worker="w", interval_s=5)
    store.put(DesiredVersion("minilm", "2", content_hash="ab", at=1))
    store.put(DesiredVersion("other", "1", at=1))
    for _ in range(3):
        reconciler.sweep()
    assert worker.calls == [("load", "minilm/2", "ab")]
    store.put(DesiredVersion("minilm", "2", content_hash="ab", at=2))
    reconciler.sweep()
    store.put(DesiredVersion("minilm", "2", is_wanted=False, content_hash="ab", at=3))
    reconciler.sweep()
    assert worker.calls[1:] == [("load", "minilm/2", "ab"), ("unload", "minilm/2", "ab")]


def test_keys_carry_the_prefix_and_report_loaded_versions(store: StateStore, shared_redis: RedisServer, prefix: str):
    """Both keys have the prefix of the settings; a worker that stops withdraws its report (IN-017, IN-018)."""
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
    """A record is followed at the next sweep at the latest, and at once after a nudge (IN-020)."""
    worker = Worker("minilm")
    reconciler = Reconciler(store, worker, worker="w", interval_s=0.4)
    reconciler.start()
    try:
        wait_until(lambda: store.loaded(), 5, "the first sweep")
        store.put(DesiredVersion("minilm", "2", at=1))
        wait_until(lambda: worker.calls, 30, "the next sweep")
    finally:
        reconciler.stop()
    patient = Reconciler(store, worker, worker="w", interval_s=600)
    patient.start()
    try:
        wait_until(lambda: len(worker.calls) == 2, 5, "its first sweep")
        store.put(DesiredVersion("minilm", "2", at=2))
        patient.nudge()
        wait_until(lambda: len(worker.calls) == 3, 5, "the nudged sweep")
    finally:
        patient.stop()


def test_removed_records_are_forgotten(store: StateStore):
    """A worker keeps only the records that are in the store, so that its memory stays bounded."""
    worker = Worker("minilm")
    reconciler = Reconciler(store, worker, worker="w", interval_s=5)
    for number in range(3):
        store._redis.delete(store._wanted)
        store.put(DesiredVersion("minilm", f"{number}", at=1))
        reconciler.sweep()
    assert set(reconciler._followed) == {"minilm/2"}
    assert [reference for _, reference, _ in worker.calls] == ["minilm/0", "minilm/1", "minilm/2"]


def test_a_stop_is_not_lost_in_a_sweep(store: StateStore):
    """The stop comes while the first sweep reports: the thread ends at once, not an interval later."""
    reconciler: Reconciler

    class Stopping(Worker):
        def described(self) -> Mapping[str, object]:
            reconciler.ask_to_stop()
            return {}

    reconciler = Reconciler(store, Stopping("minilm"), worker="w", interval_s=600)
    reconciler.start()
    reconciler._thread.join(60)
    assert not reconciler._thread.is_alive()
    assert store.loaded() == {}


def test_a_store_that_hangs_does_not_delay_the_stop():
    """It accepts connections and sends no answer: the stop does not wait for the current sweep."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        store = StateStore.from_url(f"redis://127.0.0.1:{hanging.getsockname()[1]}/0", "state")
        reconciler = Reconciler(store, Worker("minilm"), worker="w", interval_s=600)
        reconciler.start()
        connection, _ = hanging.accept()
        reconciler.stop()
        assert reconciler._thread.is_alive(), "the stop did not wait for it"
        connection.close()
    # Refused from here on, so the thread ends, too.
    reconciler._thread.join(60)
    assert not reconciler._thread.is_alive()


def test_only_signed_records_are_followed_where_signatures_are_required(store: StateStore, tmp_path: Path):
    """An unsigned record, a stranger's and one in another field are refused."""
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
    assert worker.calls == []
    store.put(DesiredVersion("minilm", "1"), operator.sign)
    reconciler.sweep()
    assert worker.calls == [("load", "minilm/1", "")]


def test_a_store_that_is_away_unloads_nothing(redis_server: RedisServer, prefix: str):
    """Sweeps fail and the worker keeps its versions; it sweeps again when the store is back, emptied (IN-007)."""
    worker = Worker("minilm")
    store = StateStore.from_url(redis_server.url, prefix)
    store.put(DesiredVersion("minilm", "1"))
    reconciler = Reconciler(store, worker, worker="w", interval_s=0.1)
    reconciler.start()
    wait_until(lambda: worker.calls, 5, "the first sweep")
    redis_server.kill()
    with pytest.raises(BrokerUnavailable):
        store.desired()
    redis_server.start()
    wait_until(lambda: "w" in StateStore.from_url(redis_server.url, prefix).loaded(), 10, "it sweeps again")
    reconciler.stop()
    assert worker.calls == [("load", "minilm/1", "")]
    assert not [thread for thread in threading.enumerate() if thread.name == "reconciler"]


def test_a_command_is_carried_out_behind_the_records_that_were_written_before_it(store: StateStore):
    """A registration is stored as a request to unload. Followed behind a command, it would unload what that wants."""
    worker = Worker("minilm")
    reconciler = Reconciler(store, worker, worker="w", interval_s=600)
    reconciler.start()
    try:
        for number in range(20):
            content = f"{number:02x}"
            store.put(DesiredVersion("minilm", "2", is_wanted=False, content_hash=content, at=number))
            reconciler.sweep_before(partial(worker.request_load, "minilm", "2", content_hash=content))
            wait_until(lambda: worker.calls[-1:] == [("load", "minilm/2", content)], 5, "the command is carried out")  # noqa: B023
            assert worker.calls[-2:] == [("unload", "minilm/2", content), ("load", "minilm/2", content)]
    finally:
        reconciler.stop()


def test_a_command_needs_no_store(shared_redis: RedisServer, prefix: str):
    """While the store is away a worker still obeys."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        away = StateStore.from_url(f"redis://127.0.0.1:{silent.getsockname()[1]}/0", prefix)
        worker = Worker("minilm")
        reconciler = Reconciler(away, worker, worker="w", interval_s=600)
        reconciler.start()
        try:
            reconciler.sweep_before(partial(worker.request_load, "minilm", "1"))
            wait_until(lambda: worker.calls == [("load", "minilm/1", "")], 30, "the command is carried out")
        finally:
            reconciler.stop()
