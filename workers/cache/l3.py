"""The tier that a fleet shares: entries in Redis, sealed where there are data keys.

    get_many   one MGET --> opened values with their remaining lifetimes; see safety/shared_entries.py
    put_many   sealed values --> SET with PX: Redis removes what has expired
    forget     SCAN for the names of one group, then UNLINK; `clear` for those of this prefix

Names and seals are those of safety/cache_entry.py, so that a client reads the same entries. One Redis server, or a
primary with replicas: the keys of one call are on several slots of a Redis Cluster, which refuses that.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from random import random
from typing import Any, Final

from penstock.registry.broker.broker_url import parse_broker_url
from penstock.registry.errors import ConfigurationError, InvalidInput, described
from penstock.registry.settings import Settings
from penstock.registry.shared_cache import NoAnswer, SharedCache, transport_problem
from penstock.safety.cache_entry import (
    EntryKey,
    is_stored_name,
    seal_entry,
    stored_name,
    stored_pattern,
)
from penstock.safety.sealing import DataKeys
from penstock.safety.shared_entries import SharedEntries, server_ms
from penstock.workers.cache.tier import Found, Put, TierStats

__all__ = ["L3Cache", "L3CacheConfig", "l3_of"]

_PUT_BYTES: Final = 1 << 20
"""A round trip of `put_many` has no more, unless one value is larger."""
_SCAN_COUNT: Final = 1000
_LONGEST_TTL_MS: Final = 10**14
"""About 3,000 years. Redis refuses a time that exceeds 64 bits."""


@dataclass(frozen=True, slots=True)
class L3CacheConfig:
    """Where the shared entries are, and how long they live.

    redis_url: redis://, rediss:// or unix://, with the options of redis-py, such as ?ssl_ca_certs=FILE.
    key_prefix: begins the name of each entry. Caches with different prefixes have no entry in common.
    ttl_seconds: the lifetime of entries that `put` stores without one. tls_enabled: TLS also for redis://.
    socket_timeout: the longest time of a call, in seconds.
    Raises ConfigurationError for unusable values.
    """

    redis_url: str = field(default="redis://localhost:6379/0", repr=False)
    key_prefix: str = "penstock:cache:"
    ttl_seconds: float = 86_400.0
    tls_enabled: bool = False
    socket_timeout: float = 5.0

    def __post_init__(self) -> None:
        parse_broker_url(self.redis_url)
        if not isinstance(self.key_prefix, str) or not self.key_prefix:
            raise ConfigurationError(f"key_prefix is {described(self.key_prefix)}. Expected a text, such as tenant_a:")
        for name in ("ttl_seconds", "socket_timeout"):
            value = getattr(self, name)
            if type(value) not in (int, float) or not value > 0 or not isfinite(value):
                raise ConfigurationError(f"{name} is {described(value)}. Expected a positive number of seconds")


class L3Cache:
    """Entries in Redis; for any thread. No call raises for a broken server: it counts that, and finds nothing.

    data_keys: they seal the values; without them, values are stored plain. See transport_problem.
    clock: monotonic seconds. jitter: a number in [0, 1), for the pauses after failed calls.
    Raises ConfigurationError for an unusable URL. Connects with the first call.
    """

    name: Final = "l3"

    def __init__(
        self,
        config: L3CacheConfig | None = None,
        data_keys: DataKeys | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random,
    ) -> None:
        config = config or L3CacheConfig()
        self.config: Final = config
        self._data_keys = data_keys
        self._clock = clock
        self._server = SharedCache(
            config.redis_url,
            tls_enabled=config.tls_enabled,
            timeout_s=config.socket_timeout,
            clock=clock,
            jitter=jitter,
        )
        self._entries = SharedEntries(config.key_prefix, data_keys)
        self._ahead_ms: int | None = None
        """The server's clock minus ours, as of the last answer; None before the first one."""
        self._stats = TierStats(is_size_known=False)
        self._lock = threading.Lock()

    @property
    def stats(self) -> TierStats:
        """A copy of the counters. Redis does not tell `entries`, `nbytes`, `expired` and `evicted` of one prefix."""
        with self._lock:
            return replace(self._stats)

    def put(self, key: str, value: bytes, ttl_seconds: float | None = None) -> bool:
        """Store a value under a name of your own. Whether it was stored. ttl_seconds: None means the config's."""
        if not isinstance(value, bytes):
            raise InvalidInput(f"The value is {described(value)}. Expected bytes")
        ttl_s = self.config.ttl_seconds if ttl_seconds is None else ttl_seconds
        return self.put_many([Put(_own_key(key), value, ttl_s)]) == 1

    def get(self, key: str) -> bytes | None:
        """The value that `put` stored under this name; None if there is none."""
        found = self.get_many([_own_key(key)])[0]
        return None if found is None else found.value

    def delete(self, key: str) -> bool:
        """Remove the value under this name. Whether there was one."""
        return self.delete_many([_own_key(key)]) == 1

    def get_many(self, keys: Sequence[EntryKey]) -> list[Found | None]:
        """See Tier. The lifetimes are those at the moment of the answer, less the time of the call."""
        if not keys:
            return []
        begun = self._clock()
        answers = self._ask(self._entries.commands(keys))
        if answers is None:
            self._count(misses=len(keys))
            return [None] * len(keys)
        opened = self._entries.opened(keys, answers)
        taken_s = self._note_time(opened.server_ms) - begun
        # An entry may expire while the answer is under way.
        found = [
            None if value is None or (ttl_s := lives_ms / 1000 - taken_s) <= 0 else Found(value, ttl_s)
            for value, lives_ms in zip(opened.values, opened.lives_ms, strict=True)
        ]
        misses = found.count(None)
        self._count(
            hits=len(keys) - misses, misses=misses, refused=opened.refused, errors=int(opened.server_ms is None)
        )
        return found

    def put_many(self, entries: Sequence[Put]) -> int:
        """See Tier. Entries without a positive lifetime are not stored."""
        stored = errors = 0
        for commands in self._sets([entry for entry in entries if entry.ttl_s > 0]):
            answers = self._ask(commands)
            if answers is None:
                # The server is broken: the next part would be skipped.
                break
            self._note_time(server_ms(answers.pop()))
            refusals = sum(answer != b"OK" for answer in answers)
            stored += len(answers) - refusals
            errors += refusals
        self._count(puts=stored, errors=errors)
        return stored

    def delete_many(self, keys: Sequence[EntryKey]) -> int:
        """See Tier."""
        if not keys:
            return 0
        prefix = self.config.key_prefix
        return self._numbers(self._ask([("UNLINK", *[stored_name(prefix, key) for key in keys])]))

    def forget(self, group: str) -> int:
        """See Tier."""
        return self._unlink(stored_pattern(self.config.key_prefix, group))

    def clear(self) -> int:
        """See Tier."""
        return self._unlink(stored_pattern(self.config.key_prefix))

    def close(self) -> None:
        """See Tier."""
        self._server.close()

    def _sets(self, entries: Sequence[Put]) -> Iterator[list[tuple[bytes | str | int, ...]]]:
        """The commands of each round trip; the last one asks for the server's clock."""
        if not entries or not self._knows_time():
            return
        prefix, data_keys = self.config.key_prefix, self._data_keys
        commands: list[tuple[bytes | str | int, ...]] = []
        size = 0
        for key, value, ttl_s in entries:
            if commands and size + len(value) > _PUT_BYTES:
                yield [*commands, ("TIME",)]
                commands, size = [], 0
            ttl_ms = max(1, int(min(ttl_s * 1000, _LONGEST_TTL_MS)))
            sealed = seal_entry(data_keys, key, value, self._server_ms() + ttl_ms)
            commands.append(("SET", stored_name(prefix, key), sealed, "PX", ttl_ms))
            size += len(value)
        yield [*commands, ("TIME",)]

    def _knows_time(self) -> bool:
        """Whether the server's clock is known. It is asked before the first write."""
        if self._ahead_ms is None and (answers := self._ask([("TIME",)])) is not None:
            self._note_time(server_ms(answers[0]))
            self._count(errors=int(self._ahead_ms is None))
        return self._ahead_ms is not None

    def _note_time(self, now_ms: int | None) -> float:
        """Takes the server's clock from an answer. Returns our clock, in seconds."""
        now = self._clock()
        if now_ms is not None:
            # The answer was under way: entries end rather too early than too late.
            self._ahead_ms = now_ms - int(now * 1000)
        return now

    def _server_ms(self) -> int:
        return max(0, int(self._clock() * 1000) + (self._ahead_ms or 0))

    def _unlink(self, pattern: bytes) -> int:
        """Removes the entries whose names match. Another program's keys may match, and stay."""
        prefix, cursor, removed = self.config.key_prefix, b"0", 0
        commands: list[tuple[bytes | str | int, ...]] = []
        while True:
            # What a SCAN has found is removed in the round trip of the next one.
            commands.append(("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT))
            answers = self._ask(commands)
            if answers is None:
                return removed
            *numbers, scanned = answers
            removed += self._numbers(numbers)
            if not isinstance(scanned, list) or len(scanned) != 2 or not isinstance(scanned[1], list):
                self._count(errors=1)
                return removed
            cursor = scanned[0]
            names = [name for name in scanned[1] if isinstance(name, bytes) and is_stored_name(prefix, name)]
            commands = [("UNLINK", *names)] if names else []
            if cursor == b"0":
                return removed + self._numbers(self._ask(commands) if commands else [])

    def _numbers(self, answers: list[Any] | None) -> int:
        """The sum of answers that are numbers. Refusals are counted."""
        numbers = [answer for answer in answers or () if isinstance(answer, int)]
        self._count(errors=len(answers or ()) - len(numbers))
        return sum(numbers)

    def _ask(self, commands: Sequence[Sequence[bytes | str | int]]) -> list[Any] | None:
        answers = self._server.ask(commands)
        if isinstance(answers, NoAnswer):
            is_skipped = answers is NoAnswer.SKIPPED
            self._count(skipped=int(is_skipped), errors=int(not is_skipped))
            return None
        return answers

    def _count(
        self, *, hits: int = 0, misses: int = 0, puts: int = 0, refused: int = 0, errors: int = 0, skipped: int = 0
    ) -> None:
        stats = self._stats
        with self._lock:
            stats.hits += hits
            stats.misses += misses
            stats.puts += puts
            stats.refused += refused
            stats.errors += errors
            stats.skipped += skipped


def l3_of(settings: Settings, data_keys: DataKeys | None) -> L3Cache | None:
    """The shared tier of a worker with these settings; None for none: it needs `cache.redis_url`, and the mode
    `persisted_encrypted`.

    data_keys: None only if `privacy.encrypt_at_rest` is off. Raises ConfigurationError when entries would be stored or
    sent plain against the settings.
    """
    cache, privacy = settings.inference.cache, settings.inference.privacy
    if not cache.redis_url or not settings.inference.persists_answers:
        return None
    if not privacy.encrypt_at_rest:
        data_keys = None
    elif data_keys is None:
        raise ConfigurationError("The shared cache has no data key. Expected one, or privacy.encrypt_at_rest = false")
    if (problem := transport_problem(cache.redis_url, data_keys is not None)) is not None:
        raise ConfigurationError(problem)
    config = L3CacheConfig(
        redis_url=cache.redis_url,
        key_prefix=cache.key_prefix,
        ttl_seconds=cache.ttl_seconds,
        socket_timeout=cache.socket_timeout_s,
    )
    return L3Cache(config, data_keys)


def _own_key(key: str) -> EntryKey:
    if not isinstance(key, str):
        raise InvalidInput(f"The key is {described(key)}. Expected a text")
    return EntryKey("", key.encode("utf-8", "surrogatepass"))
