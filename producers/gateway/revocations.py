"""What is open for an API key ends about a second after the key: streams, WebSockets, requests that wait.

    watch(key, end) -> each second: KeyCopy -> the key was revoked, has expired or has another secret -> end()

One task looks for all of them, while there are any. While the keys cannot be read, what is open goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Final, TypeAlias

from penstock.producers.gateway.key_copy import KeyCopy
from penstock.registry.api_keys import ApiKey
from penstock.registry.errors import PenstockError

__all__ = ["REVOKED", "Revocations"]

REVOKED: Final = "The API key was revoked, or has expired, meanwhile. Expected a valid one"
_INTERVAL_S: Final = 1.0
End: TypeAlias = Callable[[], object]


class Revocations:
    """What one process has open for its keys. For its event loop. clock: unix seconds."""

    def __init__(self, keys: KeyCopy, clock: Callable[[], float], interval_s: float = _INTERVAL_S) -> None:
        self._keys = keys
        self._clock = clock
        self._interval_s = interval_s
        self._open: dict[object, tuple[ApiKey, End]] = {}
        self._looking: asyncio.Task[None] | None = None

    def watch(self, key: ApiKey, end: End) -> Callable[[], object]:
        """Calls `end` once, when the key stops working. Returns what ends the watch, and does no harm after it.

        key: as it was when it opened.
        """
        token = object()
        self._open[token] = key, end
        if self._looking is None:
            self._looking = asyncio.get_running_loop().create_task(self._look())
        return lambda: self._open.pop(token, None)

    async def aclose(self) -> None:
        """Watches no more."""
        self._open.clear()
        if (looking := self._looking) is not None:
            looking.cancel()
            await asyncio.wait([looking])

    async def _look(self) -> None:
        try:
            while self._open:
                await asyncio.sleep(self._interval_s)
                # Requests that come now are refused with the reason.
                with suppress(PenstockError):
                    self._end_invalid(await self._keys.fresh())
        finally:
            self._looking = None

    def _end_invalid(self, keys: Mapping[str, ApiKey]) -> None:
        now = self._clock()
        for token, (key, end) in [*self._open.items()]:
            latest = keys.get(key.id)
            if latest is None or not latest.opens(key.digest, now):
                self._open.pop(token, None)
                end()
