"""The connections of one RedisConnection: kept while they are idle, replaced when the server has closed them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.registry.broker.redis_connection import RedisConnection
from tests.servers import RedisServer

CLIENT_ID = ["CLIENT", "ID"]


@pytest.fixture
def connection(redis_server: RedisServer) -> Iterator[RedisConnection]:
    with closing(RedisConnection.from_url(redis_server.url)) as connection:
        yield connection


def test_commands_of_one_thread_share_a_connection(connection: RedisConnection):
    """Each command finds the connection of the one before."""
    assert len({connection._once(CLIENT_ID) for _ in range(5)}) == 1


def test_a_connection_that_the_server_closed_while_idle_is_replaced(
    connection: RedisConnection, redis_server: RedisServer
):
    """Also by a command that is not repeated: nothing was sent yet."""
    first = connection._once(CLIENT_ID)
    with redis_server.client() as operator:
        operator.execute_command("CLIENT", "KILL", "ID", first)
    assert connection._once(CLIENT_ID) != first


def test_a_fork_does_not_use_the_connection_of_its_parent(connection: RedisConnection):
    """Their answers would get mixed up."""
    first = connection._once(CLIENT_ID)
    reading, writing = os.pipe()
    if not (child := os.fork()):
        try:
            os.write(writing, str(connection._once(CLIENT_ID)).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    found = os.read(reading, 100)
    for descriptor in (reading, writing):
        os.close(descriptor)
    assert found.isdigit()
    assert int(found) != first
    assert connection._once(CLIENT_ID) == first
