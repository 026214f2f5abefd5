"""Texts are tokenised once, in order, and the cache stays within its bounds (AR-053)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.runtime.tokeniser import TokenCache, Tokeniser
from tests.servers import require_module

tokenizers = require_module("tokenizers")

WORDS = ["the", "pipe", "carries", "water", "to", "a", "turbine"]


def word_level() -> Any:
    """A tokenizer of seven words, made here."""
    vocabulary = {"[UNK]": 0, **{word: number for number, word in enumerate(WORDS, 1)}}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))  # noqa: S106 - no password
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return backend


def listed(tokens: Sequence[np.ndarray]) -> list[list[int]]:
    return [ids.tolist() for ids in tokens]


@given(st.lists(st.lists(st.sampled_from(WORDS), max_size=6).map(" ".join), max_size=80), st.integers(1, 5))
def test_cache_and_pool_change_no_id(texts: list[str], threads: int):
    """Whatever is on, each text gets its ids in its place, the second time as the first."""
    plain, tuned = Tokeniser(word_level()), Tokeniser(word_level())
    tuned.cache = TokenCache(20, 4_000)
    tuned.use_pool(threads)
    expected = listed(plain.encode(texts))
    assert listed(tuned.encode(texts)) == expected
    assert listed(tuned.encode(texts)) == expected
    tuned.close()


def test_repeats_reach_the_tokenizer_once():
    """The count of texts that are tokenised falls on repeats, also within one batch; without a cache it does not."""
    tokeniser = Tokeniser(word_level())
    texts = ["the pipe", "water", "the pipe"]
    tokeniser.encode(texts)
    assert tokeniser.tokenised == 3
    tokeniser.cache = TokenCache(100, 1 << 20)
    for _ in range(5):
        tokeniser.encode(texts)
    assert tokeniser.tokenised == 3 + 2
    assert tokeniser.cache.hits == 4 * 3


@given(st.lists(st.text(max_size=40), max_size=100), st.integers(1, 10), st.integers(1_000, 60_000))
def test_cache_stays_within_entries_and_bytes(texts: list[str], max_entries: int, max_bytes: int):
    """For any texts both bounds hold, and only kept entries are counted."""
    cache = TokenCache(max_entries, max_bytes)
    for text in texts:
        cache.remember([text], [np.arange(len(text), dtype=np.int32)])
        assert len(cache) <= max_entries
        assert cache.nbytes <= max_bytes
    if not len(cache):
        assert cache.nbytes == 0


def test_least_recently_used_text_goes_first():
    """A text that is asked for stays, one that is not makes room."""
    cache = TokenCache(2, 1 << 20)
    ids = np.zeros(1, np.int32)
    cache.remember(["first", "second"], [ids, ids])
    cache.find(["first"])
    cache.remember(["third"], [ids])
    assert [found is not None for found in cache.find(["first", "second", "third"])] == [True, False, True]


def test_long_text_does_not_empty_the_cache():
    """A text that would take more than a small part of the room is not kept."""
    cache = TokenCache(100, 64_000)
    cache.remember(["short"], [np.zeros(1, np.int32)])
    cache.remember(["x" * 2_000], [np.zeros(500, np.int32)])
    assert len(cache) == 1


def test_texts_are_cut_only_where_told():
    """Truncation is the package's choice, whatever the tokenizer's file says."""
    backend = word_level()
    backend.enable_truncation(1)
    assert len(Tokeniser(backend).encode(["the pipe carries water"])[0]) == 4
    assert len(Tokeniser(word_level(), truncate_at=2).encode(["the pipe carries water"])[0]) == 2


def test_many_threads_share_a_tokeniser():
    """Preparing on several threads at a time mixes nothing up."""
    tokeniser = Tokeniser(word_level())
    tokeniser.cache = TokenCache(8, 1 << 20)
    tokeniser.use_pool(2)
    texts = [f"{first} {second}" for first in WORDS for second in WORDS]
    expected = listed(Tokeniser(word_level()).encode(texts))
    wrong: list[object] = []

    def encode() -> None:
        for _ in range(20):
            if listed(tokeniser.encode(texts)) != expected:
                wrong.append(texts)

    threads = [threading.Thread(target=encode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tokeniser.close()
    assert wrong == []


def test_pool_gain_is_the_ratio_of_both_ways():
    """Measured in turns; nothing is turned on by it."""
    ticks = iter(range(0, 1000, 1))
    now = [0.0]

    def clock() -> float:
        now[0] += 3.0 if next(ticks) % 3 == 1 else 1.0
        return now[0]

    tokeniser = Tokeniser(word_level(), max_threads=2)
    assert tokeniser.pool_gain(["the pipe"] * 64, 3, clock) == 3.0
    assert tokeniser.tokenised == 0


class Meeting:
    """A tokenizer in which so many threads have to be at the same time."""

    def __init__(self, parties: int) -> None:
        self._backend = word_level()
        self._barrier = threading.Barrier(parties, timeout=60)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode_batch_fast(self, texts: Sequence[str]) -> Any:
        self._barrier.wait()
        return self._backend.encode_batch_fast(texts)


@pytest.mark.parametrize("threads", [2, 3])
def test_parts_of_a_batch_are_tokenised_at_the_same_time(threads: int):
    """All threads of the pool are inside the tokenizer at once, or the test hangs; the ids stay equal (AR-053)."""
    texts = [f"{first} {second}" for first in WORDS for second in WORDS]
    tokeniser = Tokeniser(Meeting(threads))
    tokeniser.use_pool(threads)
    assert listed(tokeniser.encode(texts)) == listed(Tokeniser(word_level()).encode(texts))
    tokeniser.close()
