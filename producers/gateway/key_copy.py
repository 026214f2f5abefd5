"""The API keys in this process: a copy of the registry's that is never used when it is a second old.

    request -> fresh -> young: the copy at once | middle-aged: the copy, and a read begins | old: after that read

A read asks for the last change of the copy and for all later ones, however many keys there are. So a busy process reads
twice a second, no request waits for it, and a revoked key stops within a second. Where the last change is not there any
more, the registry may have been restored from a backup, and may use its revisions a second time: all keys are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from math import inf
from typing import Final

from penstock.registry.api_keys import ApiKey

__all__ = ["LONGEST_AGE_S", "KeyCopy", "ReadKeys"]

ReadKeys = Callable[[int], list[ApiKey]]
"""Reads the keys that were changed after a revision, in the order of their changes; see SqlApiKeys.since. It blocks, in
a thread of its own."""
LONGEST_AGE_S: Final = 1.0
_READ_AFTER_S: Final = 0.5


class KeyCopy:
    """The keys by id. For one event loop. now: monotonic seconds; None: those of the loop."""

    def __init__(self, read: ReadKeys, now: Callable[[], float] | None = None) -> None:
        self._read = read
        self._now = now
        self._keys: dict[str, ApiKey] = {}
        self._last: ApiKey | None = None
        """The key of the last change that the copy has."""
        self._as_of = -inf
        """When the last read began that has succeeded."""
        self._expired_at = -inf
        self._reading: asyncio.Task[None] | None = None

    def expire(self) -> None:
        """Read the keys again for the next request: one has changed in this process. On the loop."""
        now = self._now or asyncio.get_running_loop().time
        self._as_of, self._expired_at = -inf, now()

    async def fresh(self) -> Mapping[str, ApiKey]:
        """The keys as they were less than LONGEST_AGE_S ago. Raises RegistryUnavailable."""
        now = self._now or asyncio.get_running_loop().time
        asked = now()
        if asked - self._as_of >= _READ_AFTER_S:
            reading = self._begin(now)
            while asked - self._as_of >= LONGEST_AGE_S:
                # A request that is cancelled does not stop the read for the others.
                await asyncio.shield(reading)
                if asked - self._as_of >= LONGEST_AGE_S:
                    # A slow read, which had begun long before this request.
                    reading = self._begin(now)
        return self._keys

    def _begin(self, now: Callable[[], float]) -> asyncio.Task[None]:
        """The read under way, or a new one."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._update(now))
            self._reading.add_done_callback(self._forget)
        return self._reading

    async def _update(self, now: Callable[[], float]) -> None:
        begun = now()
        changed, is_whole = await asyncio.to_thread(self._read_changes, self._last)
        if is_whole:
            self._keys = {}
        self._keys.update((key.id, key) for key in changed)
        self._last = changed[-1] if changed else None
        if begun >= self._expired_at:
            self._as_of = begun

    def _read_changes(self, last: ApiKey | None) -> tuple[list[ApiKey], bool]:
        """(keys, whether they are all keys): `last` and those that changed later, or all of them. It blocks."""
        # The row of `last` is also gone when that key has changed again. A read of all keys is right then, too.
        if last is not None and (changed := self._read(last.revision - 1)) and changed[0] == last:
            return changed, False
        return self._read(0), True

    def _forget(self, reading: asyncio.Task[None]) -> None:
        self._reading = None
        if not reading.cancelled():
            # The requests that wait for it raise the error. Without any, the next one reads again.
            reading.exception()
