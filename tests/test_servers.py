"""The servers that other tests stand on: what a kill, a pause and a missing program do."""

from __future__ import annotations

import pytest
import redis

from tests.servers import PostgresDatabase, RedisServer, free_port, require, wait_until


def test_missing_server_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch):
    """Nobody mistakes a run without its servers for a run that passed."""
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs a unicorn"):
        require(None, "a unicorn")
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI needs a unicorn"):
        require(None, "a unicorn")
    assert require(7, "a unicorn") == 7


def test_missing_postgres_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch):
    """A server that is not there is a reason to skip, and in CI to fail."""
    monkeypatch.setenv("PGHOST", "127.0.0.1")
    monkeypatch.setenv("PGPORT", str(free_port()))
    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="needs a PostgreSQL"):
        PostgresDatabase().create()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI needs a PostgreSQL"):
        PostgresDatabase().create()


def test_waiting_in_vain_fails_the_test():
    """A condition that never holds ends with its name."""
    with pytest.raises(pytest.fail.Exception, match=r"not within 0\.05 s: rain"):
        wait_until(lambda: False, 0.05, "rain")


def test_killed_redis_comes_back_with_its_data(redis_server: RedisServer):
    """What was answered before a SIGKILL is there after the restart, over the socket and over the port."""
    with redis_server.client() as client:
        client.set("key", "value")
    first = redis_server.pid
    redis_server.restart()
    assert redis_server.pid != first
    with redis.Redis.from_url(redis_server.tcp_url) as client:
        assert client.get("key") == b"value"


def test_paused_redis_answers_after_the_pause(redis_server: RedisServer):
    """A frozen server keeps its connections and says nothing."""
    with redis_server.client(timeout_s=0.2) as client:
        client.set("key", "value")
        redis_server.pause()
        with pytest.raises(redis.TimeoutError):
            client.get("key")
        redis_server.resume()
        assert client.get("key") == b"value"


def test_monitor_sees_every_command(redis_server: RedisServer):
    """The list holds what reached the server inside the block, in order, and nothing else."""
    with redis_server.client() as client:
        client.set("before", 1)
        with redis_server.monitor() as commands:
            client.set("a", 1)
            client.get("b")
        client.set("after", 1)
    assert [command for command in commands if command.split()[0] in ("SET", "GET")] == ["SET a 1", "GET b"]
