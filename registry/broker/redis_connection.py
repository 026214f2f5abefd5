"""Connections to one Redis: commands with a time-out, repeated when the connection is lost, and errors translated.

    URL -> parse_broker_url -> open_client -> command -> answer
                                                 `-> error -> redis_refusals: refused at once, or repeated

    RedisConnection    one command at a time on pooled connections; the base of the ends in redis_producer.py,
                       redis_worker.py and redis_operator.py
    DirectConnection   a connection that one thread owns; several commands in one round trip

A lost connection becomes BrokerUnavailable when the time-out is over; a refusal becomes BrokerRefused at once. A key of
another type is quarantined, and the command is repeated; see foreign_keys.py. Every command may be repeated, because
the call that sends it may: publishing goes by job id, commits are fenced, other calls read or extend.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, NoReturn, Self, TypeVar

import redis
import redis.asyncio
from hiredis import pack_command
from redis.backoff import NoBackoff
from redis.exceptions import InvalidResponse, NoScriptError, ResponseError
from redis.retry import Retry

from penstock.registry.broker import foreign_keys
from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import Quarantined
from penstock.registry.broker.broker_url import BrokerAddress, parse_broker_url
from penstock.registry.broker.redis_packing import packed_together
from penstock.registry.broker.redis_refusals import final, lost, refusal, speaks_tls, unanswered
from penstock.registry.broker.redis_tls import AsyncTlsConnection, TlsConnection, answers_tls
from penstock.registry.errors import BrokerDamaged, ClientUnusable, ConfigurationError, PenstockError

__all__ = [
    "LOST_CONNECTION",
    "REPAIRS",
    "RETRY_PAUSE_S",
    "DirectConnection",
    "RedisConnection",
    "closed_connection",
    "check_broker",
    "connection_options",
    "diagnosed",
    "is_no_group",
    "log_quarantined",
    "may_speak_tls",
    "open_client",
    "open_redis",
    "quarantine_keys",
]

Client = TypeVar("Client", redis.Redis, redis.asyncio.Redis)

logger = logging.getLogger("penstock.registry")

RETRY_PAUSE_S: Final = 0.05
REPAIRS: Final = 3
"""How often one command quarantines foreign keys: another program may write them again."""
_MOST_NOTED: Final = 1000
LOST_CONNECTION: Final = (redis.ConnectionError, redis.TimeoutError, InvalidResponse, OSError)


def connection_options(timeout_s: float) -> dict[str, Any]:
    """The options of every client of Redis that we make, for redis.Redis.from_url and its asyncio counterpart."""
    return {
        "protocol": 2,
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "decode_responses": False,
        # Each thread has its own connection. At the library's limit of 100 the broker would look unavailable.
        "max_connections": 2**31,
    }


def open_client(from_url: Callable[..., Client], retry: object, url: str, timeout_s: float) -> Client:
    """`from_url(url)` with our options; the client connects later. Raises ConfigurationError for an unusable URL.

    retry: redis-py's policy, which must not repeat: we repeat, so that `timeout_s` is the longest time of a call.
    """
    address = parse_broker_url(url)
    try:
        client = from_url(url, retry=retry, **connection_options(timeout_s))
        pool: Any = client.connection_pool
        if address.is_tls:
            pool.connection_class = AsyncTlsConnection if isinstance(client, redis.asyncio.Redis) else TlsConnection
        # Options of the URL are arguments of a connection. An unknown one would be found with the first command.
        pool.connection_class(**pool.connection_kwargs)
    except (ValueError, TypeError, redis.RedisError):
        raise ConfigurationError(
            f"{address}: the broker's URL has an option that is unknown or has an unusable value. Expected the options "
            "of redis-py, such as ?db=0 or ?ssl_ca_certs=FILE"
        ) from None
    return client


def open_redis(url: str, timeout_s: float) -> redis.Redis:
    """A plain client of redis-py with our options. Connects later. Raises ConfigurationError for an unusable URL."""
    return open_client(redis.Redis.from_url, Retry(NoBackoff(), 0), url, timeout_s)


def check_broker(url: str, timeout_s: float) -> None:
    """Asks the broker once whether it accepts this process.

    Raises BrokerRefused, ConfigurationError for an unusable URL, and BrokerUnavailable when there is no answer.
    """
    connection = RedisConnection.from_url(url, timeout_s=timeout_s)
    with contextlib.closing(connection):
        connection.ping()


def may_speak_tls(error: BaseException, address: BrokerAddress) -> bool:
    """Whether the server hung up on a first command without TLS. Then ask it with `answers_tls`."""
    hung_up = ConnectionResetError | BrokenPipeError
    is_of_system = isinstance(error.__context__, OSError) and not isinstance(error.__context__, hung_up)
    is_lost = isinstance(error, redis.ConnectionError | InvalidResponse) and not isinstance(error, redis.TimeoutError)
    return address.scheme == "redis" and is_lost and not is_of_system


def diagnosed(error: BaseException, address: BrokerAddress) -> PenstockError | None:
    """The error for a first command that failed and that no repetition helps; None for any other failure.

    It may ask the port itself whether it speaks TLS, for half a second.
    """
    refused = final(error, address)
    if refused is None and may_speak_tls(error, address) and answers_tls(address.host, address.port):
        return speaks_tls(address)
    return refused


class RedisConnection:
    """Commands on pooled connections. Thread-safe.

    Attributes:
        clock_offset_ms: the broker's clock minus this machine's monotonic clock, as of the last claim or reading of
            depths. A change of this machine's wall clock has no effect on it.
    """

    def __init__(
        self, client: redis.Redis, address: BrokerAddress, *, timeout_s: float = 5.0, result_ttl_ms: int = 3_600_000
    ) -> None:
        self.timeout_s = timeout_s
        self.address = address
        # The wall clock is the best guess until the broker has told its time.
        self.clock_offset_ms = (time.time() - time.monotonic()) * 1000
        self._redis = client
        self._pool: _Pool | _ClosedPool = _Pool(client.connection_pool)
        self._result_ttl_ms = result_ttl_ms
        self._quarantined: deque[Quarantined] = deque(maxlen=_MOST_NOTED)
        """What this end has quarantined since it was last asked."""
        self._translation = _Translation(address)
        self._has_answered = False
        """Whether the server has answered once, or was asked for the reason why it does not."""

    @classmethod
    def from_url(cls, url: str, *, timeout_s: float = 5.0, result_ttl_ms: int = 3_600_000) -> Self:
        """From redis://, rediss:// or unix://. Connects later. Raises ConfigurationError for other URLs."""
        client = open_redis(url, timeout_s)
        return cls(client, parse_broker_url(url), timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)

    def ping(self) -> None:
        """Asks for any answer. Raises BrokerRefused or BrokerUnavailable."""
        self._run(["PING"])

    def now_ms(self) -> float:
        """The broker's clock, without a command."""
        return time.monotonic() * 1000 + self.clock_offset_ms

    def close(self) -> None:
        """Close the connections. Later calls raise ClientUnusable."""
        # Before the pool closes: a call under way in another thread would open a new connection.
        self._pool = _ClosedPool()
        self._redis.close()

    def forget_connections(self) -> None:
        """After a fork: drop the parent's connections without closing its sockets."""
        self._redis.connection_pool.reset()
        self._pool = _Pool(self._redis.connection_pool)

    def _note_clock(self, broker_ms: float, begun: float) -> None:
        """Corrects the offset: the broker's clock showed `broker_ms` at some moment between `begun` and now.

        The correction is the smallest one that agrees with this: the process may have been stopped before it read
        the answer.
        """
        earliest, latest = broker_ms - time.monotonic() * 1000, broker_ms - begun * 1000
        self.clock_offset_ms = min(max(self.clock_offset_ms, earliest), latest)

    def _run(self, command: scripts.Call) -> Any:
        """One command, repeated on a new connection until the time-out. A refusal is raised at once."""
        deadline, repairs = time.monotonic() + self.timeout_s, 0
        foreign: ResponseError | None = None
        while True:
            try:
                if foreign is not None:
                    self._quarantine(command, foreign)
                answer = self._once(command)
            except ResponseError as error:
                if not foreign_keys.is_foreign(error) or repairs == REPAIRS:
                    raise refusal(error, self.address, command) or error from error
                foreign, repairs = error, repairs + 1
            except BrokerDamaged:
                # It is a ConnectionError, too.
                raise
            except LOST_CONNECTION as error:
                self._raise_if_final(error)
                if deadline - time.monotonic() <= RETRY_PAUSE_S:
                    raise unanswered(error, self.address, self.timeout_s) from error
                time.sleep(RETRY_PAUSE_S)
            else:
                self._has_answered = True
                return answer

    def _quarantine(self, command: scripts.Call, error: ResponseError) -> None:
        """Puts the foreign keys of a command out of its way. Raises BrokerDamaged when this user may not do that."""
        for call in foreign_keys.calls(command, error):
            try:
                self._quarantined += log_quarantined(self._once(call))
            except ResponseError as refused:
                raise refusal(error, self.address, command) or error from refused

    def _raise_if_final(self, error: BaseException) -> None:
        refused = final(error, self.address) if self._has_answered else diagnosed(error, self.address)
        # Asked once: the port does not change its mind, and the question takes time.
        self._has_answered = True
        if refused is not None:
            raise refused from error

    def _translated(self) -> AbstractContextManager[None]:
        """A lost connection becomes BrokerUnavailable, and so does a server that cannot work at present."""
        return self._translation

    def _once(self, command: scripts.Call) -> Any:
        """One command, not repeated when the connection is lost. Loads the scripts if the server has lost them."""
        try:
            return self._ask(command)
        except NoScriptError:
            self._load()
            return self._ask(command)

    def _ask(self, command: scripts.Call) -> Any:
        """One command on a pooled connection, without the layers that redis-py puts around each."""
        pool = self._pool
        try:
            connection: Any = pool.get_connection()
            try:
                connection.send_packed_command([pack_command(tuple(command))], check_health=False)
                return connection.read_response()
            except ResponseError:
                raise
            except BaseException:
                # The answer may still come, also after an interrupt. The next command must not read it.
                connection.disconnect()
                raise
            finally:
                pool.release(connection)
        except Exception as error:
            if isinstance(self._pool, _ClosedPool):
                # Closed by another thread. What redis-py raises then depends on the moment: a TypeError, for example.
                raise closed_connection() from error
            raise

    def _load(self) -> None:
        for source in scripts.SOURCES.values():
            self._ask(["SCRIPT", "LOAD", source])


class _Translation:
    """See RedisConnection._translated. It has no state: a worker enters it several times for each job."""

    __slots__ = ("_address",)

    def __init__(self, address: BrokerAddress) -> None:
        self._address = address

    def __enter__(self) -> None:
        """Nothing is to be done."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None or isinstance(error, BrokerDamaged):
            return
        if isinstance(error, ResponseError):
            if (refused := refusal(error, self._address, ())) is not None:
                raise refused from error
        elif isinstance(error, LOST_CONNECTION):
            raise final(error, self._address) or lost(error, self._address) from error


class _Pool:
    """The connections of a pool of redis-py. Thread-safe.

    Those that are idle are kept here: the pool takes as long to hand out a connection as a command takes.
    """

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._idle: deque[Any] = deque()
        self._process = os.getpid()

    def get_connection(self) -> Any:
        """A connection on which a command can be sent."""
        if self._process != os.getpid():
            # They are the parent's.
            self._idle.clear()
            self._process = os.getpid()
        try:
            connection = self._idle.pop()
        except IndexError:
            return self._pool.get_connection()
        if _is_usable(connection):
            return connection
        # The pool connects it again.
        self._pool.release(connection)
        return self._pool.get_connection()

    def release(self, connection: Any) -> None:
        """The answer to the command was read, or the connection is closed."""
        self._idle.append(connection)


def _is_usable(connection: Any) -> bool:
    """Whether an idle connection is open. One on which the server has sent something, such as its end, is not."""
    if (sock := connection._sock) is None:
        return False
    poller = select.poll()
    poller.register(sock, select.POLLIN)
    return not poller.poll(0)


class _ClosedPool:
    """The pool of a closed RedisConnection."""

    def get_connection(self) -> NoReturn:
        raise closed_connection()

    def release(self, connection: NoReturn) -> None:
        """Nothing was handed out."""


class DirectConnection:
    """A connection that one thread owns, outside the pool: several commands in one round trip."""

    def __init__(self, client: redis.Redis) -> None:
        # The pool counts every connection that it ever made: after enough lost ones it would make no more.
        pool: Any = client.connection_pool
        connection: Any = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        self._connection = connection

    def ask(self, calls: Sequence[scripts.Call], meanwhile: Callable[[], None] | None = None) -> list[Any]:
        """The answers to several commands that are sent together. An error of Redis replaces its answer.

        meanwhile: called while Redis works on them.
        """
        connection = self._connection
        connection.send_packed_command(list(packed_together(calls)), check_health=False)
        if meanwhile is not None:
            try:
                meanwhile()
            except BaseException:
                # The answers are still to come. The next call must not read them.
                self.close()
                raise
        return [self._answer() for _ in calls]

    def _answer(self) -> Any:
        """The next answer, or the error of Redis in its place."""
        try:
            return self._connection.read_response()
        except ResponseError as error:
            return error

    def close(self) -> None:
        """Close the connection."""
        with contextlib.suppress(redis.RedisError, OSError):
            self._connection.disconnect()


def quarantine_keys(client: redis.Redis, types: Mapping[str, str]) -> None:
    """Quarantines foreign keys through a plain client of redis-py. types: by key of one slot, its type."""
    plain: Any = client
    call = foreign_keys.call_for(types)
    try:
        names = plain.execute_command(*call)
    except NoScriptError:
        plain.script_load(scripts.SOURCES["quarantine"])
        names = plain.execute_command(*call)
    log_quarantined(names)


def log_quarantined(names: Sequence[bytes]) -> list[Quarantined]:
    """What the answer of `quarantine` tells, with a line in the log for each key."""
    found = [foreign_keys.parse_quarantined(name.decode(errors="replace")) for name in names]
    for each in found:
        logger.error(
            "a key of another type was quarantined", extra={"key": each.key, "type": each.kind, "quarantine": each.name}
        )
    return found


def closed_connection() -> ClientUnusable:
    """The error of a call on a connection that was closed."""
    return ClientUnusable("The connection to the broker was closed. Expected an open one")


def is_no_group(error: object) -> bool:
    """Whether this error says that the consumer group is missing."""
    # Redis 7 answers a blocked reader of a deleted stream with another word.
    return isinstance(error, ResponseError) and ("NOGROUP" in str(error) or str(error).startswith("UNBLOCKED"))
