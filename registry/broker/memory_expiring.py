"""Values of the broker in memory that expire."""

from __future__ import annotations

import copy
import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

__all__ = ["Expiring"]

Value = TypeVar("Value")


class Expiring(Generic[Value]):
    """Values by key, each with its own time of expiry."""

    __slots__ = ("_due", "_now_ms", "_values")

    def __init__(self, now_ms: Callable[[], float]) -> None:
        self._now_ms = now_ms
        self._values: dict[str, tuple[float, Value]] = {}
        self._due: list[tuple[float, str]] = []

    def __getitem__(self, key: str) -> Value:
        return self._values[key][1]

    def __deepcopy__(self, memo: dict[int, object]) -> Expiring[Value]:
        """A copy of the values on the same clock."""
        copied: Expiring[Value] = Expiring(self._now_ms)
        copied._values, copied._due = copy.deepcopy(self._values, memo), list(self._due)
        return copied

    def get(self, key: str) -> Value | None:
        """The value, or None when there is none or it has expired."""
        found = self._values.get(key)
        return found[1] if found is not None and found[0] > self._now_ms() else None

    def values(self) -> list[Value]:
        """The values that have not expired, in the order in which they were put."""
        now_ms = self._now_ms()
        return [value for until_ms, value in self._values.values() if until_ms > now_ms]

    def put(self, key: str, value: Value, ttl_ms: float) -> None:
        """Keep the value for `ttl_ms` from now. Expired values are deleted."""
        now_ms = self._now_ms()
        while self._due and self._due[0][0] <= now_ms:
            _, due = heapq.heappop(self._due)
            if due in self._values and self._values[due][0] <= now_ms:
                del self._values[due]
        self._values[key] = (now_ms + ttl_ms, value)
        heapq.heappush(self._due, (now_ms + ttl_ms, key))

    def extend(self, key: str, ttl_ms: float) -> None:
        """Keep the value, if it has not expired, for `ttl_ms` from now."""
        value = self.get(key)
        if value is not None:
            self.put(key, value, ttl_ms)

    def pop(self, key: str) -> None:
        """Delete the value."""
        self._values.pop(key, None)
