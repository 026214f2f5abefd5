"""check_foreign_keys: what was quarantined, and the line that ends the finding."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.compose.doctor.findings import Finding
from penstock.compose.doctor.foreign_keys import check_foreign_keys
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.queues import MODELS_KEY, Priority, flow_key, stream_key
from tests.servers import RedisServer


@pytest.fixture
def broker(redis_server: RedisServer) -> Iterator[RedisStreams]:
    """An operator's end of a broker with one model."""
    with closing(RedisStreams.from_url(redis_server.url)) as broker:
        broker.put_spec("mlp", b"{}")
        yield broker


def _overwritten(server: RedisServer, broker: RedisStreams, *keys: str) -> list[Finding]:
    with server.client() as client:
        for key in keys:
            client.delete(key)
            client.set(key, "x")
            broker.quarantine(["mlp"])
            broker.put_spec("mlp", b"{}")
    return list(check_foreign_keys(broker))


def test_nothing_was_overwritten(broker: RedisStreams):
    """One finding that says so."""
    (finding,) = check_foreign_keys(broker)
    assert (finding.status, finding.fix) == ("ok", "")


def test_each_key_is_a_warning_with_the_line_that_ends_it(broker: RedisStreams, redis_server: RedisServer):
    """It names the key, the type and the time; after its line the finding is gone."""
    queue = stream_key("mlp", Priority.HIGH)
    first, second = _overwritten(redis_server, broker, MODELS_KEY, queue)
    assert {first.status, second.status} == {"warning"}
    assert second.what.startswith(f"another program wrote a string to {queue}; it was quarantined at 2")
    assert MODELS_KEY in first.what
    for finding in (first, second):
        _, _, line = finding.fix.partition("redis-cli ")
        with redis_server.client() as client:
            assert client.execute_command(*shlex.split(line)) == 1
    assert [finding.status for finding in check_foreign_keys(broker)] == ["ok"]


def test_many_keys_are_counted(broker: RedisStreams, redis_server: RedisServer):
    """The first twenty are named; a line lists the others."""
    found = _overwritten(redis_server, broker, *[flow_key("mlp")] * 23)
    assert len(found) == 21
    assert found[-1].what == "3 more keys of other programs were quarantined"
    assert found[-1].fix == "redis-cli ZRANGE '{mlp}:quarantine' 0 -1"
