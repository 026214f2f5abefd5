"""The servers that other tests stand on: what a kill, a pause and a missing program do."""

from __future__ import annotations

import json
import signal
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from tests.fork_server import ForkServer
from tests.servers import PostgresDatabase, RedisServer, free_port, require, wait_until


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    """One of the tests' own."""
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


def test_missing_server_skips_here_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch):
    """A run without its servers does not look like a run that passed."""
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
        wait_until(lambda: False, 0.05, "rain", least_s=0.0)


def test_killed_redis_comes_back_with_its_data(redis_server: RedisServer):
    """What was answered before a SIGKILL is there after the restart, over the socket and over the port."""
    with redis_server.client() as client:
        client.set("key", "value")
    redis_server.await_writes()
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


def test_process_of_a_fork_server_is_one_like_any_other(fork_server: ForkServer, tmp_path: Path):
    """It has its own arguments, environment, folder and output, no framework is loaded, and its exit status is told."""
    program = """
        import json, os, sys
        frameworks = {"torch", "transformers", "onnxruntime"} & set(sys.modules)
        print(json.dumps([__name__, sys.argv[1:], dict(os.environ), os.getcwd(), sorted(frameworks)]), flush=True)
        print("a word", file=sys.stderr)
        sys.exit(7)
    """
    (tmp_path / "telling.py").write_text(textwrap.dedent(program))
    output = tmp_path / "output"
    child = fork_server.run("telling", ["a", "b"], environment={"ONLY": "this"}, folder=tmp_path, output=output)
    assert (child.wait(180), child.poll(), child.returncode) == (7, 7, 7)
    told, word = output.read_text().splitlines()
    assert json.loads(told) == ["__main__", ["a", "b"], {"ONLY": "this"}, str(tmp_path), []]
    assert word == "a word"


def test_processes_of_a_fork_server_are_signalled_one_by_one(fork_server: ForkServer, tmp_path: Path):
    """SIGKILL ends one and is its status, the other runs on; waiting too long raises, and a traceback is status 1."""
    (tmp_path / "sleeping.py").write_text("import time\ntime.sleep(60)")
    (tmp_path / "broken.py").write_text("raise ValueError('no')")
    asleep: dict[str, Any] = {"environment": {}, "folder": tmp_path, "output": tmp_path / "output"}
    first, second, third = (fork_server.run("sleeping", [], **asleep) for _ in range(3))
    third.send_signal(signal.SIGINT)
    assert third.wait(180) == -signal.SIGINT
    first.send_signal(signal.SIGKILL)
    assert first.wait(180) == -signal.SIGKILL
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(0.02)
    second.send_signal(signal.SIGTERM)
    assert second.wait(180) == -signal.SIGTERM
    assert fork_server.run("broken", [], **asleep).wait(180) == 1
    assert "ValueError: no" in (tmp_path / "output").read_text()


class Remembered(dict[int, int]):
    """Statuses of processes that had every number before, except of those that were forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.forgotten: set[int] = set()

    def get(self, pid: int, default: Any = None) -> Any:
        return super().get(pid, default if pid in self.forgotten else -9)

    def pop(self, pid: int, default: Any = None) -> Any:
        self.forgotten.add(pid)
        return super().pop(pid, default)


def test_process_with_a_number_that_was_used_before_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The kernel gives numbers anew: the status of an earlier process is not that of this one."""
    (tmp_path / "waiting.py").write_text("import time\ntime.sleep(600)\n")
    server = ForkServer()
    monkeypatch.setattr(server, "_statuses", Remembered())
    child = server.run("waiting", [], environment={}, folder=tmp_path, output=tmp_path / "output")
    try:
        assert child.poll() is None
    finally:
        child.send_signal(signal.SIGKILL)
    assert child.wait(180) == -signal.SIGKILL
    server.close()
