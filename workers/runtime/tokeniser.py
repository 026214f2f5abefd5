"""Texts -> token ids, each text once: a cache for repeated texts, and a few threads for large batches.

    encode(texts) -- known --> the cache, which evicts the least recently used
              '--- unknown --> the Rust tokenizer, which releases the GIL --> the cache

Both are off until the optimizer turns them on (level 1). Neither changes an id.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable

import numpy as np
from numpy.typing import NDArray

__all__ = ["Ids", "TokenCache", "Tokeniser", "Tokenising"]

Ids: TypeAlias = NDArray[np.int32]

_ENTRY_BYTES: Final = 300
"""Bytes of an entry besides its text and its ids: two object headers and a place in the table."""
_LARGEST_SHARE: Final = 64
"""A text may take at most one part in 64 of the cache's bytes: one long text is not worth a hundred short ones."""
_SMALLEST_PART: Final = 16
"""The fewest texts that are worth handing to another thread."""


class TokenCache:
    """Texts and their ids, bounded in entries and bytes. Evicts the least recently used. For any thread."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, Ids] = OrderedDict()
        self._nbytes = 0
        self.hits = 0
        """Texts found so far."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def nbytes(self) -> int:
        """Bytes that the entries take, estimated."""
        return self._nbytes

    def find(self, texts: Sequence[str]) -> list[Ids | None]:
        """The ids of each text; None for an unknown text."""
        entries = self._entries
        with self._lock:
            found = [entries.get(text) for text in texts]
            for text, ids in zip(texts, found, strict=True):
                if ids is not None:
                    entries.move_to_end(text)
                    self.hits += 1
        return found

    def remember(self, texts: Sequence[str], ids: Sequence[Ids]) -> None:
        """Keeps the ids of new texts."""
        with self._lock:
            for text, each in zip(texts, ids, strict=True):
                nbytes = _size(text, each)
                if text in self._entries or nbytes * _LARGEST_SHARE > self._max_bytes:
                    continue
                self._entries[text] = each
                self._nbytes += nbytes
            while self._nbytes > self._max_bytes or len(self._entries) > self._max_entries:
                self._nbytes -= _size(*self._entries.popitem(last=False))


class Tokeniser:
    """A tokenizer of the `tokenizers` library, set to add no padding and to cut at `truncate_at`. For any thread.

    truncate_at: the most tokens of a text; None: texts are not cut. max_threads: the most threads of a pool.
    """

    def __init__(self, backend: Any, truncate_at: int | None = None, max_threads: int = 1) -> None:
        backend.no_padding()
        if truncate_at is None:
            backend.no_truncation()
        else:
            backend.enable_truncation(truncate_at)
        self._backend = backend
        self.max_threads: Final = max_threads
        self.added_tokens: Final[int] = backend.num_special_tokens_to_add(False)
        """Tokens of an empty text."""
        self._pool: ThreadPoolExecutor | None = None
        self._threads = 1
        self.cache: TokenCache | None = None
        self.tokenised = 0
        """Texts that went through the tokenizer, without those that the cache knew."""

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in order. Callers must not write to them."""
        cache = self.cache
        if cache is None:
            return self._tokenise(texts)
        found = cache.find(texts)
        unknown = list(dict.fromkeys(text for text, ids in zip(texts, found, strict=True) if ids is None))
        if not unknown:
            return [ids for ids in found if ids is not None]
        fresh = dict(zip(unknown, self._tokenise(unknown), strict=True))
        cache.remember(unknown, list(fresh.values()))
        return [fresh[text] if ids is None else ids for text, ids in zip(texts, found, strict=True)]

    def use_pool(self, threads: int) -> None:
        """Tokenises large batches with this many threads from now on; 1: on the caller's own thread."""
        before = self._pool
        self._pool = ThreadPoolExecutor(threads - 1, "tokenise") if threads > 1 else None
        self._threads = threads
        if before is not None:
            before.shutdown(wait=False)

    def cache_agreement(self, texts: Sequence[str]) -> float:
        """The share of texts whose remembered ids are those that the tokenizer gives again. Changes nothing.

        A tokenizer with dropout gives other ids each time.
        """
        cache = TokenCache(len(texts), 1 << 30)
        cache.remember(texts, self._encode(texts))
        again = self._encode(texts)
        same = [
            found is not None and np.array_equal(found, ids)
            for found, ids in zip(cache.find(texts), again, strict=True)
        ]
        return sum(same) / max(1, len(same))

    def pool_gain(self, texts: Sequence[str], rounds: int, clock: Callable[[], float]) -> float:
        """How many times faster `max_threads` threads tokenise these texts than one thread. Changes nothing."""
        threads, ratios = self.max_threads, []
        with ThreadPoolExecutor(max(1, threads - 1), "tokenise") as pool:
            for _ in range(rounds):
                begun = clock()
                self._encode(texts)
                between = clock()
                self._encode_in_parts(texts, pool, threads)
                ratios.append((between - begun) / (clock() - between))
        return median(ratios)

    def close(self) -> None:
        """Ends the pool's threads and forgets the cache."""
        self.use_pool(1)
        self.cache = None

    def _tokenise(self, texts: Sequence[str]) -> list[Ids]:
        self.tokenised += len(texts)
        pool, parts = self._pool, min(self._threads, len(texts) // _SMALLEST_PART)
        return self._encode(texts) if pool is None or parts < 2 else self._encode_in_parts(texts, pool, parts)

    def _encode_in_parts(self, texts: Sequence[str], pool: ThreadPoolExecutor, parts: int) -> list[Ids]:
        edges = [len(texts) * part // parts for part in range(parts + 1)]
        own, *others = [texts[start:stop] for start, stop in pairwise(edges)]
        running = [pool.submit(self._encode, part) for part in others]
        return [*self._encode(own), *(ids for part in running for ids in part.result())]

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        encodings = self._backend.encode_batch_fast(texts)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]


@runtime_checkable
class Tokenising(Protocol):
    """A runtime that turns text into tokens."""

    @property
    def tokeniser(self) -> Tokeniser | None:
        """None while nothing is loaded."""


def _size(text: str, ids: Ids) -> int:
    # CPython keeps a string in 1, 2 or 4 bytes a character; few texts need more than 2.
    return _ENTRY_BYTES + ids.nbytes + len(text) * (1 if text.isascii() else 2)
