"""The Redis of the shared cache: several commands in one round trip, within a bound, or no answer at all.

    commands -> SharedCache.ask -> answers           an error of Redis stands in its command's place
                                -> NoAnswer.FAILED   no connection, no answer in time, no Redis
                                -> NoAnswer.SKIPPED  a call failed shortly before; see circuit_breaker.py

A cache may be missing at any time, so no call raises for its server. Workers and clients share this module.
"""

from __future__ import annotations

import contextlib
import logging
import os
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import Enum
from random import random
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import hiredis
import redis
from redis.exceptions import ResponseError

from penstock.registry.broker.broker_url import BrokerAddress, parse_broker_url
from penstock.registry.broker.redis_connection import open_redis
from penstock.registry.broker.redis_tls import ServerWithoutTls
from penstock.registry.circuit_breaker import CircuitBreaker
from penstock.registry.errors import ConfigurationError

__all__ = ["NoAnswer", "SharedCache", "transport_problem"]

logger = logging.getLogger("penstock.registry")

_FIRST_PAUSE_S: Final = 0.5
_LONGEST_PAUSE_S: Final = 30.0
_MOST_IDLE: Final = 8
_READ_BYTES: Final = 1 << 18
_UNVERIFIED: Final = frozenset({"ssl_cert_reqs", "ssl_check_hostname"})
_VERIFYING: Final = frozenset({"required", "true", "yes", "1", "y"})
# Its stub knows commands of one part only.
_pack: Final[Callable[[tuple[bytes | str | int, ...]], bytes]] = hiredis.pack_command  # type: ignore[assignment]


class NoAnswer(Enum):
    """Why a call has no answers."""

    FAILED = "failed"
    """No connection, no answer in time, or an answer that is not Redis's."""
    SKIPPED = "skipped"
    """The call was not made: one failed shortly before."""


def transport_problem(url: str, seals: bool) -> str | None:
    """Why entries must not travel to this URL in the mode `persisted_encrypted`; None: they may.

    seals: whether the entries are sealed. Then every URL will do. Plain entries may go through a unix socket, or
    through TLS that verifies the server. redis:// is refused for the loopback, too: a tunnel or a proxy may be there.
    Raises ConfigurationError for an unusable URL.
    """
    address = parse_broker_url(url)
    if seals or not address.host:
        return None
    if not address.is_tls:
        return (
            f"The shared cache at {address} would get plain entries without TLS. Expected rediss://, a unix socket, or "
            "entries that a data key seals"
        )
    options = parse_qs(urlsplit(url).query)
    if any(value.lower() not in _VERIFYING for name in _UNVERIFIED for value in options.get(name, ())):
        return (
            f"The shared cache at {address} would get plain entries, and its certificate is not verified. Expected "
            "neither ssl_cert_reqs nor ssl_check_hostname in the URL, or entries that a data key seals"
        )
    return None


class SharedCache:
    """Connections to one Redis. For any thread; a forked child makes its own.

    url: as of the broker, with the options of redis-py. tls_enabled: TLS also for redis://.
    timeout_s: the longest time of a call, without that of the resolver of host names.
    clock, jitter: see CircuitBreaker.
    Raises ConfigurationError for an unusable URL. Connects with the first call.
    """

    def __init__(
        self,
        url: str,
        *,
        tls_enabled: bool = False,
        timeout_s: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random,
    ) -> None:
        if tls_enabled:
            url = _with_tls(url)
        self.address: Final[BrokerAddress] = parse_broker_url(url)
        self._timeout_s = timeout_s
        # Half of the time: a host may have two addresses, and a TLS handshake follows.
        self._pool: Any = open_redis(url, timeout_s / 2).connection_pool
        self._breaker = CircuitBreaker(clock, jitter, first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        self._idle: deque[_Wire] = deque()
        self._pid = os.getpid()
        self._is_closed = False

    def ask(self, commands: Sequence[Sequence[bytes | str | int]]) -> list[Any] | NoAnswer:
        """The answers to these commands, which are sent together; a redis.ResponseError for a refused command."""
        if self._is_closed or not self._breaker.admits():
            return NoAnswer.SKIPPED
        deadline = time.monotonic() + self._timeout_s
        packed = b"".join([_pack(tuple(command)) for command in commands])
        try:
            answers = self._exchange(packed, len(commands), deadline)
        except (redis.RedisError, hiredis.HiredisError, OSError, UnicodeError) as error:  # a host name may be no IDNA
            if self._breaker.failed():
                reason = _reason(error)
                logger.warning("the shared cache is left out", extra={"server": str(self.address), "reason": reason})
            return NoAnswer.FAILED
        if self._breaker.succeeded():
            logger.info("the shared cache is back", extra={"server": str(self.address)})
        return answers

    def close(self) -> None:
        """Close the connections. Later calls are skipped."""
        self._is_closed = True
        self._drop_idle()

    def _exchange(self, packed: bytes, count: int, deadline: float) -> list[Any]:
        wire = None
        try:
            with self._wire(deadline) as wire:
                return wire.ask(packed, count, deadline)
        except (ConnectionError, ssl.SSLError):
            if wire is None or not wire.was_idle or wire.has_answered:
                raise
        # The server closed the idle connections, because it was restarted. It may well be there now.
        self._drop_idle()
        with self._wire(deadline) as wire:
            return wire.ask(packed, count, deadline)

    @contextlib.contextmanager
    def _wire(self, deadline: float) -> Iterator[_Wire]:
        """A connection that no other thread uses meanwhile. It is kept unless the block raises."""
        if self._pid != os.getpid():
            # The connections belong to the parent.
            self._idle, self._pid = deque(), os.getpid()
        try:
            wire = self._idle.pop()
        except IndexError:
            wire = _Wire(self._pool, deadline)
        try:
            yield wire
        except BaseException:
            # The answers may still come. The next call must not read them.
            wire.close()
            raise
        wire.was_idle = True
        if self._is_closed or len(self._idle) >= _MOST_IDLE:
            wire.close()
        else:
            self._idle.append(wire)

    def _drop_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()


class _Refused(redis.RedisError):
    """The server refused the user, the password or the database."""


class _Wire:
    """An open connection, and the commands on it.

    redis-py makes the socket, with the options of the URL. The rest is done here: redis-py gives each piece of an
    answer a time-out of its own, so that a server which sends a byte now and then would hold the caller for ever.
    Raises the errors of redis-py and hiredis, and OSError.
    """

    def __init__(self, pool: Any, deadline: float) -> None:
        self.was_idle = self.has_answered = False
        """Whether it was kept from an earlier call; whether the present call has received anything."""
        options = pool.connection_kwargs
        self._connection = pool.connection_class(**{**options, "redis_connect_func": _say_nothing})
        self._answers = hiredis.Reader(replyError=ResponseError)
        self._connection.connect()
        try:
            self._introduce(options, deadline)
        except BaseException:
            self.close()
            raise

    def _introduce(self, options: Mapping[str, Any], deadline: float) -> None:
        commands: list[tuple[bytes | str | int, ...]] = []
        if password := options.get("password"):
            user = options.get("username")
            commands.append(("AUTH", user, password) if user else ("AUTH", password))
        if database := options.get("db"):
            commands.append(("SELECT", database))
        if commands:
            for answer in self.ask(b"".join(map(_pack, commands)), len(commands), deadline):
                if isinstance(answer, ResponseError):
                    raise _Refused from answer

    def ask(self, packed: bytes, count: int, deadline: float) -> list[Any]:
        """The answers to `count` packed commands. Raises TimeoutError when the deadline (monotonic) passes."""
        # The socket itself: redis-py would take ten times as long to read many short answers.
        sock, reader = self._connection._sock, self._answers
        self.has_answered = False
        sock.settimeout(_left(deadline))
        sock.sendall(packed)
        answers: list[Any] = []
        while len(answers) < count:
            answer = reader.gets()
            if answer is not False:
                answers.append(answer)
                continue
            sock.settimeout(_left(deadline))
            received = sock.recv(_READ_BYTES)
            if not received:
                raise ConnectionResetError("the server closed the connection")
            self.has_answered = True
            reader.feed(received)
        if reader.has_data():
            # The next call would take it for its own answer.
            raise hiredis.ProtocolError("more answers than commands")
        return answers

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(redis.RedisError, OSError):
            self._connection.disconnect()


def _say_nothing(connection: object) -> None:
    """In place of what redis-py says on a new connection."""


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left


def _with_tls(url: str) -> str:
    address = parse_broker_url(url)
    if not address.host:
        raise ConfigurationError(
            "tls_enabled is set, and the URL is that of a unix socket. Expected redis:// or rediss://"
        )
    return url if address.is_tls else f"rediss{url.removeprefix('redis')}"


def _reason(error: BaseException) -> str:
    """The cause in a few words of ours: those of a library may quote paths."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return f"its certificate is not trusted: {cause.verify_message.rstrip('.')}"
        if isinstance(cause, ServerWithoutTls | ssl.SSLError):
            return "the TLS handshake failed"
        if isinstance(cause, _Refused):
            return "it refuses the user, the password or the database, or is loading its data"
        if isinstance(cause, hiredis.HiredisError):
            return "it does not speak the Redis protocol"
        if isinstance(cause, TimeoutError | redis.TimeoutError):
            return "no answer in time"
        if isinstance(cause, FileNotFoundError):
            return "its socket or a file of certificates is missing"
        if isinstance(cause, ConnectionRefusedError):
            return "nothing listens there"
        cause = cause.__cause__ or cause.__context__
    return "the connection was lost"
