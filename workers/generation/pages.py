"""Pages of the key-value cache: free, in use by one or more requests, or idle in the prefix cache. Pure: numbers only.

    free --allocate--> in use --release--> idle, where the prefix cache knows it --allocate--> in use
                          '-------release--> free

Page 0 is reserved: tables of unequal length are filled up with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from penstock.workers.generation.prefix_cache import CachedPage, PrefixCache

__all__ = ["PagePool"]


class PagePool:
    """num_pages: with the reserved one. prefixes: None for no sharing."""

    def __init__(self, num_pages: int, page_size: int, prefixes: PrefixCache | None) -> None:
        self.num_pages: Final = num_pages
        self.page_size: Final = page_size
        self.prefixes: Final = prefixes
        self._free = list(range(num_pages - 1, 0, -1))
        self._users = [0] * num_pages

    @property
    def num_usable(self) -> int:
        """Pages that requests can have."""
        return self.num_pages - 1

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now."""
        return len(self._free) + (self.prefixes.num_idle if self.prefixes else 0)

    @property
    def num_used(self) -> int:
        """Pages that requests use."""
        return self.num_usable - self.num_available

    def pages_for(self, num_tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-num_tokens // self.page_size)

    def users(self, page: int) -> int:
        """Requests that use the page."""
        return self._users[page]

    def allocate(self, number: int) -> list[int] | None:
        """So many pages, for one request; None, and nothing is taken, where there are fewer."""
        if number > self.num_available:
            return None
        return [self._take() for _ in range(number)]

    def share(self, cached: Sequence[CachedPage]) -> list[int]:
        """Cached pages, for one more request."""
        for entry in cached:
            if self._users[entry.page] == 0 and self.prefixes is not None:
                self.prefixes.wake(entry.page)
            self._users[entry.page] += 1
        return [entry.page for entry in cached]

    def join(self, pages: Sequence[int]) -> list[int]:
        """Pages that another request uses now, for one more."""
        for page in pages:
            self._users[page] += 1
        return list(pages)

    def release(self, pages: Sequence[int]) -> list[int]:
        """Takes the pages of a request back, in its order. Returns those that became free."""
        freed = []
        for page in reversed(pages):
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self.prefixes is not None and page in self.prefixes:
                self.prefixes.rest(page)
            else:
                freed.append(page)
        self._free.extend(freed)
        return freed

    def publish(self, parent: int, tokens: Iterable[int], tenant: str, page: int) -> int | None:
        """Offers a full page to the prefix cache. Returns the id for the next page; None where nothing is shared."""
        if self.prefixes is None:
            return None
        uid, evicted = self.prefixes.publish(parent, tuple(tokens), tenant, page)
        if evicted is not None:
            self._free.append(evicted)
        return uid

    def _take(self) -> int:
        # `num_available` counts idle pages, and those are of the prefix cache.
        page = self._free.pop() if self._free else self.prefixes.evict()  # type: ignore[union-attr]
        self._users[page] = 1
        return page
