"""What only Redis has: a server that answers and refuses. Callers get BrokerUnavailable for every refusal.

A refusal that no repetition changes is a BrokerRefused, after one connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import pytest
import redis

from penstock.registry.broker.redis_async import AsyncRedisStreams
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerRefused, BrokerUnavailable, ConfigurationError
from tests.conformance.conftest import OnRedis
from tests.conformance.jobs import ROOMY, claim, commit_of, publication, publish, settle
from tests.servers import RedisServer


@contextmanager
def _read_only(redis_brokerage: OnRedis) -> Iterator[None]:
    with redis_brokerage.server.client() as client:
        client.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            yield
        finally:
            client.execute_command("REPLICAOF", "NO", "ONE")


def test_read_only_server_is_unavailable(redis_brokerage: OnRedis, slot: str):
    """In a command, in a script and in a worker's exchange; afterwards the same end works."""
    broker = redis_brokerage.connect()
    publish(broker, slot)
    (delivery,) = claim(broker, "w", slot)
    with _read_only(redis_brokerage):
        with pytest.raises(BrokerUnavailable, match="refuses to work: READONLY"):
            broker.put_spec(slot, b"{}")
        with pytest.raises(BrokerUnavailable, match="refuses to work: READONLY"):
            broker.publish(slot, [publication(slot)], ROOMY)
        with pytest.raises(BrokerUnavailable, match="refuses to work: READONLY"):
            settle(broker, "w", commit_of(delivery))
    settle(broker, "w", commit_of(delivery))
    broker.close()


_RULES = {
    "a script": (["+@all", "-evalsha", "~*"], "publish", "`publish` needs the command EVALSHA"),
    "a command of a script": (["+@all", "-xadd", "~*"], "publish", r"`publish` needs the commands .*HSET, .*XADD"),
    "a command": (["+@all", "-hget", "~*"], "spec", "expected the command HGET"),
    "the keys of a script": (
        ["+@all", "~infer.*"],
        "publish",
        r"`publish` needs the keys \{\*\}:flow, .*infer\.\{\*\}\.normal, .*\{\*\}:job:\*",
    ),
    "the keys of a command": (["+@all", "~infer.*"], "spec", r"expected the keys \{\*\}:specs\. Change the user"),
}
_CALLS: dict[str, Callable[[RedisStreams, str], object]] = {
    "publish": lambda broker, slot: broker.publish(slot, [publication(slot)], ROOMY),
    "spec": lambda broker, slot: broker.spec(slot, "7"),
}


@contextmanager
def _user(server: RedisServer, name: str, *rules: str) -> Iterator[None]:
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", name, "on", ">pw", "&*", *rules)
        try:
            yield
        finally:
            client.execute_command("ACL", "DELUSER", name)


@pytest.mark.parametrize("missing", _RULES)
def test_a_missing_right_is_named(redis_brokerage: OnRedis, slot: str, missing: str):
    """The command or the groups of keys, and the script that needs them: no key, no payload and no raw answer."""
    server = redis_brokerage.server
    rules, call, text = _RULES[missing]
    with (
        _user(server, slot, *rules),
        closing(RedisStreams.from_url(f"unix://{slot}:pw@{server.socket}?db=0")) as broker,
        pytest.raises(BrokerRefused, match=text) as refused,
    ):
        _CALLS[call](broker, slot)
    assert "NOPERM (the broker's unix socket, database 0)" in str(refused.value)
    assert slot not in str(refused.value)


_REFUSED: dict[str, Callable[[str, RedisServer], tuple[str, str]]] = {
    "a wrong password": lambda user, server: (f"unix://{user}:hunter2@{server.socket}", "refuses the user or the"),
    "a wrong user": lambda user, server: (f"unix://not-{user}:pw@{server.socket}", "refuses the user or the password"),
    "a password too many": lambda _, server: (f"unix://:hunter2@{server.socket}", "default user has none"),
    "a database too high": lambda _, server: (f"unix://{server.socket}?db=99", "has no database 99. Expected one from"),
    "a right to select": lambda user, server: (f"unix://{user}:pw@{server.socket}?db=1", "the command SELECT"),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_a_refusal_costs_one_connection(redis_brokerage: OnRedis, slot: str, case: str):
    """Nothing is repeated until the time-out. The text says which side to change, and holds no secret."""
    server = redis_brokerage.server
    url, text = _REFUSED[case](slot, server)
    with (
        _user(server, slot, "~*", "+@all", "-select"),
        closing(RedisStreams.from_url(url, timeout_s=3600)) as broker,
        server.client() as observer,
    ):
        before = _connections(observer)
        with pytest.raises((BrokerRefused, ConfigurationError), match=text) as refused:
            broker.spec(slot)
        with pytest.raises((BrokerRefused, ConfigurationError), match=text):
            asyncio.run(_ask(url, slot))
        assert _connections(observer) - before == 2
    for secret in ("hunter2", slot, "pw", str(server.folder)):
        assert secret not in str(refused.value)


async def _ask(url: str, slot: str) -> None:
    broker = AsyncRedisStreams.from_url(url, timeout_s=3600)
    try:
        await broker.spec(slot)
    finally:
        await broker.aclose()


def _connections(observer: redis.Redis) -> int:
    return int(observer.info("stats")["total_connections_received"])
