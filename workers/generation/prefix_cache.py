"""Full pages of finished computation, found again by the tokens before and in them. Pure: holds numbers of pages.

(unique id of the parent, tokens of the page, tenant) -> page

A key has the whole prefix in it, because each parent's id is used once: numbers of pages are used again, ids are not.
Tenants never share: the first parent of each is its own. Pages that no request uses are idle; the one that has been
idle for the longest time is given up first, and of one request its last pages before its first ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import count
from typing import Final, NamedTuple

__all__ = ["CachedPage", "PrefixCache", "PrefixKey"]


class PrefixKey(NamedTuple):
    """parent: the id of the page before, or 0 for a first page."""

    parent: int
    tokens: tuple[int, ...]
    tenant: str


class CachedPage(NamedTuple):
    """A page, the id that its children name as their parent, and its key."""

    page: int
    uid: int
    key: PrefixKey


class PrefixCache:
    """capacity: most pages that it knows, in use or idle."""

    def __init__(self, page_size: int, capacity: int) -> None:
        self.page_size: Final = page_size
        self.capacity: Final = capacity
        self.hits = 0
        self.queries = 0
        """Tokens that were found, and tokens that were looked up."""
        self._by_key: dict[PrefixKey, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._uids = count(1)

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    @property
    def num_idle(self) -> int:
        """Pages that no request uses."""
        return len(self._idle)

    def match(self, tokens: Sequence[int], tenant: str) -> list[CachedPage]:
        """The longest cached beginning in full pages. At least the last token is left to compute: it gives logits."""
        found: list[CachedPage] = []
        parent, size = 0, self.page_size
        for start in range(0, len(tokens) - size, size):
            cached = self._by_key.get(PrefixKey(parent, tuple(tokens[start : start + size]), tenant))
            if cached is None:
                break
            found.append(cached)
            parent = cached.uid
        return found

    def publish(self, parent: int, tokens: tuple[int, ...], tenant: str, page: int) -> tuple[int | None, int | None]:
        """Offers a page that is in use. Returns (uid for its children, page that was given up for it).

        The uid is that of an equal page where one is known. It is None where there is no room: all known pages are in
        use. A page that was given up is free.
        """
        key = PrefixKey(parent, tokens, tenant)
        if (known := self._by_key.get(key)) is not None:
            return known.uid, None
        evicted = None
        if len(self._by_page) >= self.capacity:
            if not self._idle:
                return None, None
            evicted = self.evict()
        cached = CachedPage(page, next(self._uids), key)
        self._by_key[key] = self._by_page[page] = cached
        return cached.uid, evicted

    def rest(self, page: int) -> None:
        """No request uses the page any more."""
        self._idle[page] = None

    def wake(self, page: int) -> None:
        """A request uses the idle page."""
        del self._idle[page]

    def evict(self) -> int:
        """Forgets the page that has been idle for the longest time, and returns it."""
        page, _ = self._idle.popitem(last=False)
        del self._by_key[self._by_page.pop(page).key]
        return page
