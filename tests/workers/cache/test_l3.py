"""The shared tier on a Redis that is there, that breaks, and that comes back (CF-021, CF-048, AR-032, AR-059)."""

from __future__ import annotations

import os
import random
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import product
from typing import Any, Final

import hiredis
import pytest

from penstock.registry.broker.broker_url import parse_broker_url
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.settings import Settings
from penstock.registry.shared_cache import transport_problem
from penstock.safety.cache_entry import EntryKey, stored_name
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l3 import L3Cache, L3CacheConfig, l3_of
from penstock.workers.cache.tier import Put
from tests.servers import RedisServer, free_port, wait_until

KEYS: Final = DataKeys([b"1" * 32])
FIRST: Final = EntryKey("a" * 64, b"1", "acme")
SECOND: Final = EntryKey("a" * 64, b"2", "acme")
PREFIX: Final = "test:"


class _Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def _cache(url: str, clock: Callable[[], float] | None = None, timeout_s: float = 30.0) -> Iterator[L3Cache]:
    config = L3CacheConfig(redis_url=url, key_prefix=PREFIX, socket_timeout=timeout_s)
    with closing(L3Cache(config, KEYS, clock=clock or _Clock(), jitter=lambda: 1.0)) as cache:
        yield cache


Handler = Callable[[socket.socket, Sequence[bytes]], bytes]


class _Listener:
    """A port of the loopback whose answers are the test's. `commands` are all that came, by name."""

    def __init__(self, answer: Handler) -> None:
        self.commands: list[str] = []
        self.accepted = 0
        self.answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._serve, daemon=True)]
        self._threads[0].start()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._listener.getsockname()[1]}/0"

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.accepted += 1
                self._open.append(connection)
                thread = threading.Thread(target=self._speak, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _speak(self, connection: socket.socket) -> None:
        reader = hiredis.Reader()
        with suppress(OSError):
            while received := connection.recv(1 << 16):
                reader.feed(received)
                while (command := reader.gets()) is not False:
                    self.commands.append(command[0].decode())
                    connection.sendall(self.answer(connection, command))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        for each in self._open:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(60)
        for each in (self._listener, *self._open):
            each.close()


@contextmanager
def _listener(answer: Handler) -> Iterator[_Listener]:
    with closing(_Listener(answer)) as listener:
        yield listener


def _good(connection: socket.socket, command: Sequence[bytes]) -> bytes:
    answers = {
        b"MGET": b"*%d\r\n" % (len(command) - 1) + b"$-1\r\n" * (len(command) - 1),
        b"TIME": b"*2\r\n$10\r\n1700000000\r\n$1\r\n0\r\n",
        b"SET": b"+OK\r\n",
        b"SCAN": b"*2\r\n$1\r\n0\r\n*0\r\n",
        b"UNLINK": b":0\r\n",
    }
    return answers[command[0]]


def _names(commands: Sequence[str]) -> list[str]:
    """The names of commands that a monitor saw, without the greetings of other connections."""
    return [name for command in commands if (name := command.split()[0]) not in ("CLIENT", "HELLO")]


def test_the_defaults_of_a_tier_of_a_program():
    """CF-048: a Redis of this machine without TLS, a day, and five seconds for a call."""
    config = L3CacheConfig()
    assert (config.redis_url, config.tls_enabled) == ("redis://localhost:6379/0", False)
    assert (config.ttl_seconds, config.socket_timeout) == (86_400, 5.0)


def test_usable_on_its_own(redis_server: RedisServer):
    """put, get and delete under names of one's own; Redis shows the prefix and the lifetime (CF-048)."""
    with closing(L3Cache(L3CacheConfig(redis_url=redis_server.tcp_url, key_prefix="tenant_a:"))) as cache:
        assert cache.get("key") is None
        assert cache.put("key", b"value")
        assert cache.put("other", b"", ttl_seconds=60)
        assert (cache.get("key"), cache.get("other")) == (b"value", b"")
        with redis_server.client() as client:
            names = client.keys("*")
            assert len(names) == 2
            assert all(name.startswith(b"tenant_a:") for name in names)
            lifetimes = sorted(client.ttl(name) for name in names)
        assert lifetimes[0] <= 60 < lifetimes[1] <= 86_400
        assert cache.delete("key")
        assert not cache.delete("key")
        assert cache.get("key") is None


def test_the_server_ends_entries(redis_server: RedisServer):
    """The PTTL of an entry is its remaining lifetime, so that Redis removes it (CF-019, AR-059)."""
    with _cache(redis_server.url) as cache, redis_server.client() as client:
        cache.put_many([Put(FIRST, b"1", 86_400), Put(SECOND, b"2", 0.25)])
        assert 86_000_000 < client.pttl(stored_name(PREFIX, FIRST)) <= 86_400_000
        wait_until(lambda: not client.exists(stored_name(PREFIX, SECOND)), 30, "the entry is gone")


def test_an_entry_that_outlived_its_time_is_not_served(redis_server: RedisServer):
    """An operator, or an old copy of the data, may take away the expiry of a key: its own end is in the entry."""
    with _cache(redis_server.url) as cache, redis_server.client() as client:
        cache.put_many([Put(FIRST, b"1", 86_400)])
        assert cache.get_many([FIRST]) != [None]
        stored = client.get(stored_name(PREFIX, FIRST))
        cache.put_many([Put(FIRST, b"1", 0.25)])
        short = client.get(stored_name(PREFIX, FIRST))
        client.set(stored_name(PREFIX, FIRST), short)
        wait_until(lambda: cache.get_many([FIRST]) == [None], 30, "the entry has expired")
        # Nobody moves the end of a sealed entry: it is bound to it.
        client.set(stored_name(PREFIX, FIRST), short[:1] + stored[1:9] + short[9:])
        assert cache.get_many([FIRST]) == [None]
        assert cache.stats.refused == 1


def test_the_time_of_a_call_is_taken_off():
    """An answer that was under way for ten seconds shortens the lifetime by ten seconds, and may end the entry."""
    clock = _Clock()
    stored: dict[bytes, bytes] = {}

    def answer(connection: socket.socket, command: Sequence[bytes]) -> bytes:
        if command[0] == b"SET":
            stored[command[1]] = command[2]
        if command[0] == b"MGET":
            clock.now += 10
            values = [stored[name] for name in command[1:]]
            return b"*%d\r\n" % len(values) + b"".join(b"$%d\r\n%s\r\n" % (len(each), each) for each in values)
        return _good(connection, command)

    with _listener(answer) as listener, _cache(listener.url, clock) as cache:
        cache.put_many([Put(FIRST, b"1", 60), Put(SECOND, b"2", 10)])
        first, second = cache.get_many([FIRST, SECOND])
        assert first is not None
        assert (first.ttl_s, second) == (50, None)
        assert (cache.stats.hits, cache.stats.misses) == (1, 1)


def test_a_look_up_is_one_round_trip(redis_server: RedisServer):
    """128 entries: two commands that travel together, whatever was found."""
    keys = [EntryKey("a" * 64, bytes([number]), "acme") for number in range(128)]
    with _cache(redis_server.url) as cache:
        cache.put_many([Put(key, b"value", 60) for key in keys[:64]])
        with redis_server.monitor() as commands:
            assert sum(each is not None for each in cache.get_many(keys)) == 64
    assert _names(commands) == ["MGET", "TIME"]


def test_many_large_values_are_written_in_parts(redis_server: RedisServer):
    """A round trip carries about a mebibyte, so that each is short enough for the time-out."""
    keys = [EntryKey("a" * 64, bytes([number]), "acme") for number in range(6)]
    with _cache(redis_server.url) as cache:
        cache.put_many([Put(keys[0], b"", 60)])
        with redis_server.monitor() as commands:
            assert cache.put_many([Put(key, b"x" * 400_000, 60) for key in keys]) == 6
        assert all(cache.get_many(keys))
    assert _names(commands) == ["SET", "SET", "TIME"] * 3


@pytest.mark.timeout(300)
def test_a_server_that_says_nothing(redis_server: RedisServer):
    """The call returns after its time-out; then calls are skipped, until one tries again (CF-048)."""
    clock = _Clock()
    with _cache(redis_server.tcp_url, clock, timeout_s=0.2) as cache:
        assert cache.put_many([Put(FIRST, b"1", 60)]) == 1
        redis_server.pause()
        assert cache.get_many([FIRST, SECOND]) == [None, None]
        assert (cache.stats.errors, cache.stats.skipped, cache.stats.misses) == (1, 0, 2)
        assert cache.get_many([FIRST]) == [None]
        assert cache.put_many([Put(FIRST, b"1", 60)]) == 0
        assert cache.delete_many([FIRST]) == cache.forget("a" * 64) == cache.clear() == 0
        assert (cache.stats.errors, cache.stats.skipped, cache.stats.misses) == (1, 5, 3)
        clock.now += 0.5
        assert cache.get_many([FIRST]) == [None]
        assert (cache.stats.errors, cache.stats.skipped) == (2, 5)
        clock.now += 0.5
        assert cache.get_many([FIRST]) == [None]
        assert (cache.stats.errors, cache.stats.skipped) == (2, 6)
        redis_server.resume()
        clock.now += 0.5
        with _cache(redis_server.tcp_url, clock) as patient:
            wait_until(lambda: patient.get_many([FIRST]) != [None], 30, "the server answers again")
        wait_until(lambda: _tries(cache, clock), 30, "the cache is asked again")


def _tries(cache: L3Cache, clock: _Clock) -> bool:
    clock.now += 30
    # Time passes for the lifetime of entries, too: the counters tell that it was asked.
    errors = cache.stats.errors
    cache.get_many([FIRST])
    return cache.stats.errors == errors


@pytest.mark.timeout(300)
def test_a_server_that_sends_a_byte_now_and_then():
    """The time-out is that of the whole call: each byte does not begin it anew."""
    is_over = threading.Event()

    def trickle(connection: socket.socket, command: Sequence[bytes]) -> bytes:
        while not is_over.wait(0.02):
            connection.sendall(b"+")
        return b""

    with _listener(trickle) as listener, _cache(listener.url, timeout_s=0.3) as cache:
        assert cache.get_many([FIRST]) == [None]
        assert cache.stats.errors == 1
        is_over.set()


@pytest.mark.timeout(300)
def test_a_server_that_trickles_while_connecting():
    """Password and database are part of the call, and of its time-out."""
    is_over = threading.Event()

    def trickle(connection: socket.socket, command: Sequence[bytes]) -> bytes:
        while not is_over.wait(0.02):
            connection.sendall(b"+")
        return b""

    with _listener(trickle) as listener:
        url = listener.url.replace("redis://", "redis://:secret@").replace("/0", "/3")
        with _cache(url, timeout_s=0.3) as cache:
            assert cache.get_many([FIRST]) == [None]
            assert cache.stats.errors == 1
            assert set(listener.commands) == {"AUTH"}
            is_over.set()


def test_nothing_listens():
    """A refused connection is an error, and then the tier is left out."""
    clock = _Clock()
    with _cache(f"redis://127.0.0.1:{free_port()}/0", clock) as cache:
        for errors, skipped in ((1, 0), (1, 1)):
            assert cache.get_many([FIRST]) == [None]
            assert (cache.stats.errors, cache.stats.skipped) == (errors, skipped)


def test_a_host_that_does_not_exist():
    """A name that cannot be looked up, and one that no name can be."""
    for host in ("no-such-host.invalid", f"{'x' * 70}.invalid"):
        with _cache(f"redis://{host}:6379/0") as cache:
            assert cache.get_many([FIRST]) == [None]
            assert cache.stats.errors == 1


def _reset(connection: socket.socket, command: Sequence[bytes]) -> bytes:
    connection.sendall(b"*2\r\n$100\r\nabc")
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    return b""


ODD_ANSWERS: Final[dict[str, Handler]] = {
    "reset in the middle": _reset,
    "another protocol": lambda connection, command: b"HTTP/1.1 400 Bad Request\r\n\r\n",
    "another answer": lambda connection, command: b"+OK\r\n",
    "a number": lambda connection, command: b":7\r\n",
    "too many answers": lambda connection, command: _good(connection, command) * 2,
    "too few values": lambda connection, command: b"*0\r\n" if command[0] == b"MGET" else _good(connection, command),
    "no time": lambda connection, command: b"*0\r\n" if command[0] == b"TIME" else _good(connection, command),
    "odd time": lambda connection, command: (
        b"*2\r\n$1\r\nx\r\n$1\r\ny\r\n" if command[0] == b"TIME" else _good(connection, command)
    ),
    "odd values": lambda connection, command: b"*1\r\n:7\r\n" if command[0] == b"MGET" else _good(connection, command),
    "odd scan": lambda connection, command: b"*2\r\n$1\r\n0\r\n:1\r\n" if command[0] == b"SCAN" else b"-ERR\r\n",
    "loading": lambda connection, command: b"-LOADING Redis is loading the dataset in memory\r\n",
    "no password": lambda connection, command: b"-NOAUTH Authentication required.\r\n",
}


@pytest.mark.parametrize("answer", ODD_ANSWERS.values(), ids=ODD_ANSWERS)
def test_odd_answers_are_misses(answer: Handler):
    """Each call returns without an exception, and the counters show that something is wrong."""
    clock = _Clock()
    with _listener(answer) as listener, _cache(listener.url, clock, timeout_s=5) as cache:
        assert cache.get_many([FIRST]) == [None]
        clock.now += 60
        assert cache.put_many([Put(FIRST, b"1", 60)]) in (0, 1)
        for call in (lambda: cache.delete_many([FIRST]), lambda: cache.forget("a" * 64), cache.clear):
            clock.now += 60
            call()
        stats = cache.stats
        assert stats.hits == 0
        assert stats.errors + stats.refused > 0
        listener.answer = _good
        clock.now += 60
        before = cache.stats.errors
        assert cache.get_many([FIRST]) == [None]
        assert cache.stats.errors == before


def test_random_answers_raise_nothing():
    """300 answers of random bytes that begin as Redis's do."""
    draw, clock = random.Random(7), _Clock()

    def answer(connection: socket.socket, command: Sequence[bytes]) -> bytes:
        return draw.choice([b"*", b"$", b":", b"+", b"-"]) + draw.randbytes(draw.randrange(6)) + b"\r\n"

    with _listener(answer) as listener, _cache(listener.url, clock, timeout_s=0.02) as cache:
        for _ in range(300):
            assert cache.get_many([FIRST]) == [None]
            clock.now += 60
        assert cache.stats.misses == 300


def test_a_restarted_server_is_used_at_once(redis_server: RedisServer):
    """Idle connections are dead after a restart: the call repeats itself once, on a new one."""
    with _cache(redis_server.url) as cache:
        cache.put_many([Put(FIRST, b"1", 3600)])
        redis_server.await_writes()
        redis_server.restart()
        (found,) = cache.get_many([FIRST])
        assert found is not None
        assert (cache.stats.errors, cache.stats.skipped) == (0, 0)


def test_a_read_only_server_is_read(redis_server: RedisServer):
    """A replica refuses writes, each of which is an error; reads go on."""
    with _cache(redis_server.url) as cache, redis_server.client() as client:
        cache.put_many([Put(FIRST, b"1", 3600)])
        client.execute_command("REPLICAOF", "127.0.0.1", str(free_port()))
        assert cache.put_many([Put(FIRST, b"2", 60), Put(SECOND, b"2", 60)]) == 0
        assert cache.delete_many([FIRST]) == 0
        assert (cache.stats.errors, cache.stats.skipped) == (3, 0)
        (found,) = cache.get_many([FIRST])
        assert found is not None
        assert found.value == b"1"


def test_a_full_server_is_read(redis_server: RedisServer):
    """Without room, writes are errors; reads and deletes go on."""
    with _cache(redis_server.url) as cache, redis_server.client() as client:
        cache.put_many([Put(FIRST, b"1", 3600)])
        client.config_set("maxmemory", 1)
        assert cache.put_many([Put(SECOND, b"2", 60)]) == 0
        assert cache.stats.errors == 1
        assert cache.get_many([FIRST]) != [None]
        assert cache.delete_many([FIRST]) == 1


def test_a_key_of_another_type(redis_server: RedisServer):
    """It is a miss and leaves the others alone; the next entry replaces it."""
    with _cache(redis_server.url) as cache, redis_server.client() as client:
        client.rpush(stored_name(PREFIX, FIRST), "item")
        cache.put_many([Put(SECOND, b"2", 60)])
        found = cache.get_many([FIRST, SECOND])
        assert [each and each.value for each in found] == [None, b"2"]
        assert cache.put_many([Put(FIRST, b"1", 60)]) == 1
        assert cache.get_many([FIRST]) != [None]
        assert cache.stats.errors == 0


def test_keys_of_other_programs_stay(redis_server: RedisServer):
    """Clearing takes only the names that this module writes, also under a prefix that others share."""
    others = [b"test:", b"test:entry", b"test:entry:a:b:xyz", b"test:entry:a:b", b"test:entry:a:b:c:00", b"tests", b"x"]
    with _cache(redis_server.url) as cache, redis_server.client() as client:
        client.mset(dict.fromkeys(others, b"kept"))
        cache.put_many([Put(FIRST, b"1", 60), Put(SECOND, b"2", 60)])
        assert cache.clear() == 2
        assert sorted(client.keys("*")) == sorted(others)


def test_a_user_who_may_not_scan(redis_server: RedisServer):
    """`forget` cannot do its work: that is an error, and no exception."""
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "default", "-scan")
    with _cache(redis_server.url) as cache:
        assert cache.forget("a" * 64) == 0
        assert cache.stats.errors == 1


def test_user_password_and_database(redis_server: RedisServer):
    """Those of the URL are used; a wrong password is an error, and shown in no message."""
    with redis_server.client() as client:
        client.execute_command("ACL", "SETUSER", "cache", "on", ">secret", "~*", "+@all")
    url = redis_server.tcp_url.replace("redis://", "redis://cache:secret@").replace("/0", "/3")
    with _cache(url) as cache, redis_server.client() as client:
        cache.put_many([Put(FIRST, b"1", 60)])
        assert cache.get_many([FIRST]) != [None]
        client.select(3)
        assert client.dbsize() == 1
    with _cache(url.replace("secret", "hunter2")) as cache:
        assert cache.get_many([FIRST]) == [None]
        assert cache.stats.errors == 1


def test_the_log_tells_when_the_tier_is_left_out(redis_server: RedisServer, caplog: pytest.LogCaptureFixture):
    """One line when it fails, one when it is back; none shows the password."""
    clock = _Clock()
    redis_server.kill()
    url = redis_server.tcp_url.replace("redis://", "redis://:hunter2@")
    with caplog.at_level("INFO", "penstock"), _cache(url, clock) as cache:
        for _ in range(3):
            cache.get_many([FIRST])
            clock.now += 60
        redis_server.start()
        with redis_server.client() as client:
            client.config_set("requirepass", "hunter2")
        cache.get_many([FIRST])
    lines = [record.getMessage() for record in caplog.records]
    assert lines == ["the shared cache is left out", "the shared cache is back"]
    assert vars(caplog.records[0])["reason"] == "nothing listens there"
    assert "hunter2" not in str([vars(record) for record in caplog.records])


def test_threads_have_connections_of_their_own(redis_server: RedisServer):
    """Calls of several threads do not wait for each other's answers; a few connections are kept afterwards."""
    count, barrier = 20, threading.Barrier(20)
    with _cache(redis_server.url) as cache, redis_server.client() as client:

        def work() -> None:
            barrier.wait(180)
            for _ in range(5):
                cache.get_many([FIRST])

        threads = [threading.Thread(target=work) for _ in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert cache.stats.misses == 5 * count
        assert cache.stats.errors == 0
        # Beside ours: the observer's.
        wait_until(lambda: len(client.client_list()) - 1 <= 8, 30, "the other connections are closed")
        cache.close()
        wait_until(lambda: len(client.client_list()) == 1, 30, "all are closed")


FORK: Final = """
import os, sys
from penstock.workers.cache.l3 import L3Cache, L3CacheConfig
cache = L3Cache(L3CacheConfig(redis_url=sys.argv[1], key_prefix="test:", socket_timeout=60))
assert cache.put("parent", b"1")
if (pid := os.fork()) == 0:
    os._exit(0 if cache.get("parent") == b"1" and cache.put("child", b"2") else 1)
_, status = os.waitpid(pid, 0)
assert status == 0 and cache.get("child") == b"2" and cache.stats.errors == 0
"""


def test_a_forked_child_has_connections_of_its_own(redis_server: RedisServer):
    """Two processes on one connection would read each other's answers."""
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": os.getcwd()}
    subprocess.run([sys.executable, "-c", FORK, redis_server.url], check=True, env=environment, timeout=120)
    with redis_server.client() as client:
        # The first two are the server's own check and this observer.
        assert client.info("stats")["total_connections_received"] >= 4


@pytest.mark.parametrize(
    ("url", "seals", "is_refused"),
    [
        ("redis://cache.example:6379/0", False, True),
        ("redis://127.0.0.1:6379/0", False, True),
        ("redis://localhost/0", False, True),
        ("redis://[::1]:6379/0", False, True),
        ("redis://cache.example:6379/0", True, False),
        ("rediss://cache.example:6379/0", False, False),
        ("rediss://cache.example:6379/0?ssl_ca_certs=ca.pem", False, False),
        ("rediss://cache.example:6379/0?ssl_cert_reqs=none", False, True),
        ("rediss://cache.example:6379/0?ssl_cert_reqs=optional", False, True),
        ("rediss://cache.example:6379/0?ssl_cert_reqs=required", False, False),
        ("rediss://cache.example:6379/0?ssl_check_hostname=False", False, True),
        ("rediss://cache.example:6379/0?ssl_check_hostname=True", False, False),
        ("rediss://cache.example:6379/0?ssl_cert_reqs=none", True, False),
        ("unix:///run/redis.sock", False, False),
    ],
)
def test_plain_entries_travel_protected(url: str, seals: bool, is_refused: bool):
    """Without seals only verified TLS and unix sockets will do, and not the loopback either (CF-032)."""
    problem = transport_problem(url, seals)
    assert (problem is not None) == is_refused
    if problem is not None:
        assert str(parse_broker_url(url)) in problem
        assert "Expected" in problem


def _settings(**values: Any) -> Settings:
    return Settings.load(overrides=values)


PERSISTED: Final = {"cache.privacy_mode": "persisted_encrypted", "privacy.mode": "persisted_encrypted"}


def test_the_tier_of_the_settings(redis_server: RedisServer):
    """URL, prefix, lifetime and time-out come from the settings (CF-021)."""
    settings = _settings(
        **PERSISTED,
        **{
            "cache.redis_url": redis_server.tcp_url,
            "cache.key_prefix": "mine:",
            "cache.ttl_seconds": 60,
            "cache.socket_timeout_s": 7,
        },
    )
    cache = l3_of(settings, KEYS)
    assert cache is not None
    assert cache.config == L3CacheConfig(redis_server.tcp_url, "mine:", 60, socket_timeout=7)
    with closing(cache), redis_server.client() as client:
        assert cache.put("key", b"value")
        (name,) = client.keys("*")
        assert name.startswith(b"mine:")
        assert client.ttl(name) <= 60
        assert b"value" not in client.get(name)


@pytest.mark.parametrize("modes", list(product(("ephemeral", "hashes_only", "persisted_encrypted"), repeat=2)))
def test_the_tier_exists_in_one_mode(modes: tuple[str, str], redis_server: RedisServer):
    """Only where persisted_encrypted is the stricter of both settings (CF-030, CF-031)."""
    url = redis_server.tcp_url
    settings = _settings(**{"cache.privacy_mode": modes[0], "privacy.mode": modes[1], "cache.redis_url": url})
    cache = l3_of(settings, KEYS)
    assert (cache is not None) == ("persisted_encrypted" in modes and "hashes_only" not in modes)


@pytest.mark.parametrize("off", [{"cache.redis_url": ""}, {"cache.enabled": False}], ids=["no URL", "off"])
def test_no_socket_is_opened(off: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Without a URL, or with the cache off, there is no tier at all (CF-021)."""
    opened: list[object] = []
    monkeypatch.setattr(socket.socket, "connect", lambda *arguments: opened.append(arguments))
    assert l3_of(_settings(**{**PERSISTED, "cache.redis_url": "redis://127.0.0.1:1/0", **off}), KEYS) is None
    assert opened == []


def test_plain_entries_are_never_an_accident():
    """No key is an error, unless encryption is switched off; then the way to the server must be protected (CF-032)."""
    plain = {**PERSISTED, "privacy.encrypt_at_rest": False}
    with pytest.raises(ConfigurationError, match="no data key"):
        l3_of(_settings(**PERSISTED, **{"cache.redis_url": "rediss://cache.example/0"}), None)
    with pytest.raises(ConfigurationError, match="without TLS"):
        l3_of(_settings(**plain, **{"cache.redis_url": "redis://127.0.0.1/0"}), KEYS)
    assert l3_of(_settings(**plain, **{"cache.redis_url": "rediss://cache.example/0"}), None) is not None
    assert l3_of(_settings(**PERSISTED, **{"cache.redis_url": "redis://127.0.0.1/0"}), KEYS) is not None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"redis_url": "http://cache"}, "has the scheme 'http'"),
        ({"redis_url": ""}, "is empty"),
        ({"key_prefix": ""}, "key_prefix is ''"),
        ({"key_prefix": b"x"}, "key_prefix is "),
        ({"ttl_seconds": 0}, "ttl_seconds is 0"),
        ({"ttl_seconds": float("inf")}, "ttl_seconds is inf"),
        ({"socket_timeout": -1}, "socket_timeout is -1"),
        ({"socket_timeout": "5"}, "socket_timeout is '5'"),
        ({"redis_url": "unix:///run/redis.sock", "tls_enabled": True}, "tls_enabled is set"),
        ({"redis_url": "redis://cache/0?nonsense=1"}, "an option that is unknown"),
    ],
)
def test_unusable_settings_are_told(values: dict[str, Any], expected: str):
    """Each error says what was expected."""
    with pytest.raises(ConfigurationError, match=expected) as told:
        L3Cache(L3CacheConfig(**values))
    assert "Expected" in str(told.value)


def test_unusable_calls_are_told(shared_redis: RedisServer):
    """Names are text, values are bytes."""
    with ExitStack() as stack:
        cache = stack.enter_context(_cache(shared_redis.url))
        with pytest.raises(InvalidInput, match="Expected bytes"):
            cache.put("key", "value")  # type: ignore[arg-type]  # on purpose
        with pytest.raises(InvalidInput, match="Expected a text"):
            cache.get(b"key")  # type: ignore[arg-type]  # on purpose
