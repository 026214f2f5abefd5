"""Connections to one Redis: commands with a time-out, repeated when the connection is lost, and errors translated.

    RedisConnection    one command at a time on pooled connections; the base of the ends in redis_producer.py,
                       redis_worker.py and redis_operator.py
    DirectConnection   a connection that one thread owns; several commands in one round trip

A lost connection becomes BrokerUnavailable when the time-out is over. Every command may be repeated, because the call
that sends it may: publishing goes by job id, commits are fenced, other calls read or extend.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NoReturn, Self, TypeVar

import redis
from hiredis import pack_command
from redis.backoff import NoBackoff
from redis.exceptions import NoPermissionError, NoScriptError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.retry import Retry

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.errors import BrokerUnavailable, ClientUnusable, ConfigurationError

__all__ = [
    "LOST_CONNECTION",
    "RETRY_PAUSE_S",
    "DirectConnection",
    "RedisConnection",
    "closed_connection",
    "connection_options",
    "is_no_group",
    "open_client",
    "refusal",
    "translated",
    "unanswered",
]

Client = TypeVar("Client")

RETRY_PAUSE_S: Final = 0.05
LOST_CONNECTION: Final = (redis.ConnectionError, redis.TimeoutError, OSError)
_PASSING: Final = frozenset(
    {
        "MISCONF",
        "NOREPLICAS",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "TRYAGAIN",
        "LOADING",
        "BUSY",
        "NOPERM",
        "NOAUTH",
        "READONLY",
    }
)
"""First words of errors that are about the server's present state, not about our command."""
_BY_CLASS: Final = {OutOfMemoryError: "OOM", ReadOnlyError: "READONLY", NoPermissionError: "NOPERM"}
_IN_SCRIPT: Final = re.compile(r"@user_script: ?\d+: -([A-Z]+) ")


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
    try:
        return from_url(url, retry=retry, **connection_options(timeout_s))
    except ValueError:
        raise ConfigurationError(
            "The broker's URL is not usable. Expected redis://host:port/db, rediss://... or unix:///path?db=0"
        ) from None


class RedisConnection:
    """Commands on pooled connections. Thread-safe.

    Attributes:
        clock_offset_ms: the broker's clock minus this machine's monotonic clock, as of the last claim or reading of
            depths. A change of this machine's wall clock has no effect on it.
    """

    def __init__(self, client: redis.Redis, *, timeout_s: float = 5.0, result_ttl_ms: int = 3_600_000) -> None:
        self.timeout_s = timeout_s
        # The wall clock is the best guess until the broker has told its time.
        self.clock_offset_ms = (time.time() - time.monotonic()) * 1000
        self._redis = client
        self._pool: Any = client.connection_pool
        self._result_ttl_ms = result_ttl_ms

    @classmethod
    def from_url(cls, url: str, *, timeout_s: float = 5.0, result_ttl_ms: int = 3_600_000) -> Self:
        """From redis://, rediss:// or unix://. Connects later. Raises ConfigurationError for other URLs."""
        client = open_client(redis.Redis.from_url, Retry(NoBackoff(), 0), url, timeout_s)
        return cls(client, timeout_s=timeout_s, result_ttl_ms=result_ttl_ms)

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

    def _note_clock(self, broker_ms: float, begun: float) -> None:
        """Corrects the offset: the broker's clock showed `broker_ms` at some moment between `begun` and now.

        The correction is the smallest one that agrees with this: the process may have been stopped before it read
        the answer.
        """
        earliest, latest = broker_ms - time.monotonic() * 1000, broker_ms - begun * 1000
        self.clock_offset_ms = min(max(self.clock_offset_ms, earliest), latest)

    def _run(self, command: scripts.Call) -> Any:
        """One command, repeated on a new connection until the time-out."""
        deadline = time.monotonic() + self.timeout_s
        while True:
            try:
                return self._once(command)
            except ResponseError as error:
                raise refusal(error) or error from error
            except LOST_CONNECTION as error:
                if deadline - time.monotonic() <= RETRY_PAUSE_S:
                    raise unanswered(error, self.timeout_s) from error
                time.sleep(RETRY_PAUSE_S)

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

    def _load(self) -> None:
        for source in scripts.SOURCES.values():
            self._ask(["SCRIPT", "LOAD", source])


class _ClosedPool:
    """The pool of a closed RedisConnection."""

    def get_connection(self) -> NoReturn:
        raise closed_connection()


class DirectConnection:
    """A connection that one thread owns, outside the pool: several commands in one round trip."""

    def __init__(self, client: redis.Redis) -> None:
        # The pool counts every connection that it ever made: after enough lost ones it would make no more.
        pool: Any = client.connection_pool
        connection: Any = pool.connection_class(**pool.connection_kwargs)
        connection.connect()
        self._connection = connection

    def ask(self, calls: Sequence[scripts.Call]) -> list[Any]:
        """The answers to several commands that are sent together. An error of Redis replaces its answer."""
        connection = self._connection
        connection.send_packed_command([pack_command(tuple(call)) for call in calls], check_health=False)
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


def closed_connection() -> ClientUnusable:
    """The error of a call on a connection that was closed."""
    return ClientUnusable("The connection to the broker was closed. Expected an open one")


def is_no_group(error: object) -> bool:
    """Whether this error says that the consumer group is missing."""
    # Redis 7 answers a blocked reader of a deleted stream with another word.
    return isinstance(error, ResponseError) and ("NOGROUP" in str(error) or str(error).startswith("UNBLOCKED"))


@contextlib.contextmanager
def translated() -> Iterator[None]:
    """A lost connection becomes BrokerUnavailable, and so does a server that cannot work at present."""
    try:
        yield
    except ResponseError as error:
        raise refusal(error) or error from error
    except LOST_CONNECTION as error:
        raise BrokerUnavailable(f"The broker does not answer: {_reason(error)}") from error


def refusal(error: ResponseError) -> BrokerUnavailable | None:
    """BrokerUnavailable when the server cannot work at present; None for an error of the command itself."""
    word = _first_word(error)
    if word == "OOM":
        return BrokerUnavailable("The broker refuses to write: it is out of memory")
    if word in _PASSING:
        return BrokerUnavailable(f"The broker refuses to work: {word}")
    return None


def _first_word(error: ResponseError) -> str:
    """The first word of a server's error, such as OOM or READONLY.

    redis-py removes the word from some errors and makes a class of it. Redis 6.2 puts the name and line of the script
    before the error of a command in it.
    """
    for kind, word in _BY_CLASS.items():
        if isinstance(error, kind):
            return word
    if "The user executing the script can't" in str(error):
        return "NOPERM"
    found = _IN_SCRIPT.search(str(error))
    return found[1] if found else str(error).partition(" ")[0]


def unanswered(error: BaseException, timeout_s: float) -> BrokerUnavailable:
    """The error that a user sees after a lost connection. It holds no address and no credentials."""
    return BrokerUnavailable(f"The broker did not answer within {timeout_s:g} s: {_reason(error)}")


def _reason(error: BaseException) -> str:
    return "timed out" if isinstance(error, TimeoutError | redis.TimeoutError) else "no connection"
