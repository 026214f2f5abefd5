"""check_server against servers that no test can install: old ones, nodes of a cluster, wrong clocks, full disks.

What a real Redis can be configured to do is tested in test_doctor.py.
"""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

import pytest

from penstock.compose.doctor.broker import check_server
from penstock.compose.doctor.findings import Finding
from penstock.registry.broker.broker_url import parse_broker_url

HEALTHY = {
    "redis_version": "7.2.4",
    "role": "master",
    "cluster_enabled": 0,
    "loading": 0,
    "aof_enabled": 1,
    "aof_last_write_status": "ok",
    "maxmemory": 0,
    "maxmemory_policy": "noeviction",
    "used_memory": 3 << 20,
}


@dataclass
class Answers:
    """The replies of the server: the fields of INFO, how far its clock is ahead, and its refusals by command."""

    info: dict[str, object] = field(default_factory=lambda: dict(HEALTHY))
    ahead_s: float = 0.0
    refusals: dict[str, str] = field(default_factory=dict)

    def reply(self, command: list[str]) -> bytes:
        """The bytes of a reply in RESP2."""
        name = command[0].upper()
        if name in self.refusals:
            return f"-{self.refusals[name]}\r\n".encode()
        if name == "INFO":
            return _bulk("\r\n".join(f"{key}:{value}" for key, value in self.info.items()))
        if name == "TIME":
            now = time.time() + self.ahead_s
            return b"*2\r\n" + _bulk(str(int(now))) + _bulk(str(int(now % 1 * 1e6)))
        if name == "CONFIG":
            return b"*2\r\n" + _bulk(command[2]) + _bulk("everysec")
        return b"+PONG\r\n" if name == "PING" else b"+OK\r\n"


def _bulk(text: str) -> bytes:
    return f"${len(text)}\r\n{text}\r\n".encode()


@dataclass
class Server:
    """A server of the wire protocol of Redis whose answers a test chooses."""

    url: str
    answers: Answers

    def check(self) -> tuple[list[Finding], bool]:
        """The findings, and whether further checks can ask the server."""
        return drained(check_server(self.url, 5))

    def finding(self, part: str) -> Finding:
        """The one finding whose text has this part."""
        (found,) = [each for each in self.check()[0] if part in each.what]
        return found


def drained(checks: Generator[Finding, None, bool]) -> tuple[list[Finding], bool]:
    """The findings of a check, and its result."""
    found: list[Finding] = []

    def collect() -> Generator[Finding, None, None]:
        result.append((yield from checks))

    result: list[bool] = []
    found.extend(collect())
    return found, result[0]


@pytest.fixture
def server() -> Iterator[Server]:
    """A healthy server."""
    answers = Answers()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            while header := self.rfile.readline():
                words = []
                for _ in range(int(header[1:])):
                    size = int(self.rfile.readline()[1:])
                    words.append(self.rfile.read(size + 2)[:-2].decode())
                self.wfile.write(answers.reply(words))

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listening:
        listening.daemon_threads = True
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield Server(f"redis://127.0.0.1:{listening.server_address[1]}/0", answers)
        finally:
            listening.shutdown()
            thread.join()


def test_a_healthy_server_is_asked_further(server: Server):
    """Version, persistence and memory are ok, nothing is broken, and further checks can ask the server."""
    found, can_go_on = server.check()
    assert ({finding.area for finding in found}, can_go_on) == ({"broker"}, True)
    # Latency and clock are measured, and on a busy machine they may be a warning.
    assert "broken" not in {finding.status for finding in found}
    assert "Redis 7.2.4" in found[0].what
    assert server.finding("append-only persistence is on, appendfsync everysec").status == "ok"
    assert server.finding("3 MiB used, no memory limit").fix == ""


@pytest.mark.parametrize(
    ("version", "is_refused"), [("6.0.20", True), ("5.0", True), ("6.2.0", False), ("10.0", False)]
)
def test_old_servers_are_broken(server: Server, version: str, is_refused: bool):
    """Redis 6.2 is the oldest that has all commands; nothing else is checked on an older one."""
    server.answers.info["redis_version"] = version
    found, _ = server.check()
    assert ("expected 6.2 or later" in found[0].what) is is_refused
    assert (len(found) == 1) is is_refused


@pytest.mark.parametrize(
    ("field", "value", "part"),
    [
        ("role", "slave", "it is a replica"),
        ("cluster_enabled", 1, "a node of a Redis Cluster"),
        ("loading", 1, "still loading its data"),
        ("aof_last_write_status", "err", "cannot write its append-only file"),
        ("maxmemory_policy", "volatile-lru", "maxmemory-policy is volatile-lru"),
    ],
)
def test_states_that_lose_or_refuse_jobs_are_broken(server: Server, field: str, value: object, part: str):
    """Each state is one broken finding with a fix."""
    server.answers.info[field] = value
    finding = server.finding(part)
    assert (finding.status, bool(finding.fix)) == ("broken", True)


@pytest.mark.parametrize("ahead_s", [30.0, -30.0])
def test_a_wrong_clock_is_a_warning(server: Server, ahead_s: float):
    """A clock that is half a minute ahead or behind is found, with a fix."""
    server.answers.ahead_s = ahead_s
    finding = server.finding("the clocks of this machine and of the broker differ by")
    assert (finding.status, bool(finding.fix)) == ("warning", True)


def test_memory_beyond_the_high_water_mark_is_broken(server: Server):
    """Beyond 80 % of its memory a broker accepts no job; below, the finding shows both figures."""
    server.answers.info |= {"maxmemory": 100 << 20, "used_memory": 81 << 20}
    finding = server.finding("81 MiB of 100 MiB used")
    assert (finding.status, finding.fix) == ("broken", f"redis-cli CONFIG SET maxmemory {200 << 20}")
    server.answers.info["used_memory"] = 79 << 20
    assert server.finding("79 MiB of 100 MiB used").status == "ok"


def test_a_role_without_info_is_asked_further(server: Server):
    """A user that may not run INFO gets a warning, and other checks can still ask the server."""
    server.answers.refusals["INFO"] = "NOPERM this user has no permissions to run the 'info' command"
    found, can_go_on = server.check()
    assert ([finding.status for finding in found], can_go_on) == (["warning"], True)


def test_a_server_that_refuses_is_not_asked_further(server: Server):
    """An error of the server is a broken finding, and ends the checks."""
    server.answers.refusals["INFO"] = "ERR disabled by the provider"
    found, can_go_on = server.check()
    assert ([finding.status for finding in found], can_go_on) == (["broken"], False)
    assert found[0].what == f"{parse_broker_url(server.url)} refuses INFO"


def test_a_bad_url_is_broken():
    """A URL of another protocol is a finding with an example, and not an exception."""
    found, can_go_on = drained(check_server("http://user:hunter2@host", 1))
    assert ([finding.status for finding in found], can_go_on) == (["broken"], False)
    assert "hunter2" not in str(found)
