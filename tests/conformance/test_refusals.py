"""What only Redis has: a server that answers and refuses. Callers get BrokerUnavailable for every refusal."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.errors import BrokerUnavailable
from tests.conformance.conftest import OnRedis
from tests.conformance.jobs import ROOMY, claim, commit_of, publication, publish, settle


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


@pytest.mark.parametrize("denied", ["-evalsha", "-xadd"])
def test_missing_permission_is_unavailable(redis_brokerage: OnRedis, slot: str, denied: str):
    """A role that may not do this, as a whole or one command inside a script: no raw answer of the server."""
    server = redis_brokerage.server
    with server.client() as client:
        client.execute_command("ACL", "SETUSER", slot, "on", ">pw", "~*", "&*", "+@all", denied)
    broker = RedisStreams.from_url(f"unix://{slot}:pw@{server.socket}?db=0")
    with pytest.raises(BrokerUnavailable, match="refuses to work: NOPERM"):
        broker.publish(slot, [publication(slot)], ROOMY)
    broker.close()
    with server.client() as client:
        client.execute_command("ACL", "DELUSER", slot)
