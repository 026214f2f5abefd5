"""The proxy itself: each fault does what it says, to the direction that it names, and ends when it is ended."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import redis

from tests.faults.proxy import Direction, Proxy
from tests.servers import RedisServer


@pytest.fixture
def proxy(redis_server: RedisServer) -> Iterator[Proxy]:
    """Before a server of the test's own."""
    with Proxy(redis_server.port) as proxy:
        yield proxy


def _client(proxy: Proxy) -> redis.Redis:
    return redis.Redis.from_url(proxy.url, socket_timeout=0.3, retry=None)


def test_bytes_pass_unchanged_without_a_fault(proxy: Proxy, redis_server: RedisServer):
    """A megabyte there and back."""
    value = bytes(range(256)) * 4096
    with _client(proxy) as client, redis_server.client() as direct:
        client.set("key", value)
        assert client.get("key") == value == direct.get("key")


@pytest.mark.parametrize(("direction", "arrives"), [("requests", 0), ("answers", 1)])
def test_silence_swallows_one_direction_of_open_connections(
    direction: Direction, arrives: int, proxy: Proxy, redis_server: RedisServer
):
    """The caller times out either way; only without answers has the server done it. New connections work."""
    with _client(proxy) as client, redis_server.client() as direct:
        client.ping()
        assert proxy.silence(direction) == 1
        with pytest.raises(redis.TimeoutError):
            client.incr("done")
        assert int(direct.get("done") or 0) == arrives
        with _client(proxy) as another:
            assert another.ping()


def test_partition_holds_everything_back_until_it_heals(proxy: Proxy, redis_server: RedisServer):
    """Old and new connections time out, and what was sent meanwhile arrives afterwards."""
    with _client(proxy) as client, _client(proxy) as another, redis_server.client() as direct:
        client.ping()
        proxy.partition()
        for each in (client, another):
            with pytest.raises(redis.TimeoutError):
                each.incr("done")
        assert direct.get("done") is None
        proxy.heal()
        assert client.ping()


@pytest.mark.parametrize(("directions", "arrives"), [(("answers",), 1), (("requests",), 0), ((), 0)])
def test_delay_counts_in_the_directions_it_names(
    directions: tuple[Direction, ...], arrives: int, proxy: Proxy, redis_server: RedisServer
):
    """A delay beyond the caller's patience: the request is on its way or done, and the answer never comes in time."""
    with _client(proxy) as client, redis_server.client() as direct:
        client.ping()
        proxy.delay(600, *directions)
        with pytest.raises(redis.TimeoutError):
            client.incr("done")
        assert int(direct.get("done") or 0) == arrives
        proxy.delay(0)


def test_a_delayed_answer_arrives(proxy: Proxy):
    """A delay within the caller's patience changes nothing but the time."""
    with redis.Redis.from_url(proxy.url, socket_timeout=30, retry=None) as client:
        proxy.delay(0.05)
        assert client.ping()
        proxy.delay(0)


def test_reset_ends_connections_at_once(proxy: Proxy):
    """A reader hears of it, without a time-out."""
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=180) as connection:
        connection.sendall(b"PING\r\n")
        assert connection.recv(100) == b"+PONG\r\n"
        assert proxy.reset() == 1
        with pytest.raises(ConnectionResetError):
            connection.recv(100)
    with _client(proxy) as client:
        assert client.ping()


def test_cut_answer_ends_in_the_middle(proxy: Proxy):
    """A part of the answer arrives, then the end of the connection; the next answer is whole."""
    with _client(proxy) as client:
        client.set("key", b"v" * 1000)
        proxy.cut()
        with pytest.raises(redis.ConnectionError):
            client.get("key")
        assert proxy.cuts == 1
        assert client.get("key") == b"v" * 1000
