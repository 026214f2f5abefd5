"""The cache in memory: its entries, their lifetime, and which leave first (CF-018, CF-019, AR-030, AR-057)."""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.tensors import Tensor, encode
from penstock.workers.cache import L1Cache
from penstock.workers.cache.memory import _size_of
from penstock.workers.results import EncodedOutputs

_ROOM = 1 << 20


def _answer(body: bytes = b"answer", content_hash: str = "a" * 64) -> EncodedOutputs:
    return EncodedOutputs((Tensor("y", "float32", (1, 4)),), body, content_hash, 0)


class _Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_least_recently_used_leaves_first():
    """Reading and writing an entry both count as use (CF-018)."""
    cache = L1Cache(3, _ROOM)
    for key in (b"1", b"2", b"3"):
        cache.put(key, _answer(key), 60)
    assert cache.get(b"1") == _answer(b"1")
    cache.put(b"2", _answer(b"two"), 60)
    cache.put(b"4", _answer(b"4"), 60)
    assert [cache.get(key) is not None for key in (b"1", b"2", b"3", b"4")] == [True, True, False, True]
    assert cache.get(b"2") == _answer(b"two")
    assert (len(cache), cache.evicted) == (3, 1)


def test_expired_entries_are_not_served():
    """An entry ends exactly at its time, and reading it does not prolong it (CF-019)."""
    clock = _Clock()
    cache = L1Cache(10, _ROOM, clock)
    cache.put(b"short", _answer(), 5)
    cache.put(b"long", _answer(), 60)
    clock.now += 4.9
    assert cache.get(b"short") is not None
    clock.now += 0.1
    assert cache.get(b"short") is None
    assert cache.get(b"long") is not None
    assert (len(cache), cache.nbytes, cache.evicted) == (1, _size_of(_answer()), 0)


def test_an_expired_entry_may_be_asked_for_twice():
    """Two equal jobs of one claim look it up together."""
    clock = _Clock()
    cache = L1Cache(10, _ROOM, clock)
    cache.put_alike([b"1", b"2"], [_answer(b"1"), _answer(b"2")], 5)
    cache.put(b"2", _answer(b"two"), 60)
    clock.now += 5
    assert cache.get_all([b"1", b"2", b"1"]) == [None, _answer(b"two"), None]
    assert (len(cache), cache.nbytes) == (1, _size_of(_answer(b"two")))


def test_expired_entries_leave_first():
    """A write removes them before any entry that has not expired."""
    clock = _Clock()
    cache = L1Cache(3, _ROOM, clock)
    cache.put(b"long", _answer(), 86_400)
    for key in (b"1", b"2"):
        cache.put(key, _answer(), 5)
    clock.now += 5
    cache.put(b"new", _answer(), 60)
    assert (len(cache), cache.evicted) == (2, 0)
    assert cache.get(b"long") is not None
    clock.now += 60
    cache.expire()
    assert len(cache) == 1


def test_removed_and_replaced_entries_do_not_fill_the_heap():
    """The heap of expiry times stays in proportion to the entries."""
    cache = L1Cache(10, _ROOM)
    for number in range(10_000):
        cache.put(str(number % 1000).encode(), _answer(), 86_400)
    assert len(cache) == 10
    assert len(cache._ends) < 200


def test_bytes_are_bounded():
    """Large answers leave before the number of entries is reached; an answer beyond its share is not cached."""
    cache = L1Cache(1000, 100_000)
    for key in range(100):
        cache.put(str(key).encode(), _answer(bytes(10_000)), 60)
    assert cache.nbytes <= 100_000
    assert len(cache) == 100_000 // _size_of(_answer(bytes(10_000)))
    held = len(cache)
    cache.put(b"huge", _answer(bytes(20_000)), 60)
    assert cache.get(b"huge") is None
    assert len(cache) == held
    cache.put(b"99", _answer(bytes(20_000)), 60)
    assert cache.get(b"99") is None, "the replaced answer is gone"


def test_one_content_is_forgotten():
    """All answers of this content are removed, and no others (AR-080)."""
    cache = L1Cache(100, _ROOM)
    for number in range(10):
        cache.put(bytes([number]), _answer(content_hash="ab"[number % 2] * 64), 60)
    assert cache.forget("a" * 64) == 5
    assert cache.forget("a" * 64) == 0
    assert [cache.get(bytes([number])) is not None for number in range(10)] == [False, True] * 5
    assert cache.nbytes == 5 * (_size_of(_answer()))


_Step = st.tuples(st.sampled_from(["get", "put", "wait"]), st.integers(0, 6), st.integers(1, 8))


@given(st.lists(_Step, max_size=60), st.integers(1, 4))
def test_it_behaves_like_a_plain_dictionary(steps: list[tuple[str, int, int]], capacity: int):
    """It agrees with a simple implementation on random steps (AR-030)."""
    clock = _Clock()
    cache = L1Cache(capacity, _ROOM, clock)
    oracle: OrderedDict[bytes, tuple[EncodedOutputs, float]] = OrderedDict()
    for step, number, seconds in steps:
        key = bytes([number])
        if step == "wait":
            clock.now += seconds
        elif step == "put":
            cache.put(key, _answer(bytes([number, seconds])), seconds)
            oracle.pop(key, None)
            for expired in [each for each, (_, end) in oracle.items() if end <= clock.now]:
                del oracle[expired]
            oracle[key] = _answer(bytes([number, seconds])), clock.now + seconds
            while len(oracle) > capacity:
                oracle.popitem(last=False)
        else:
            if key in oracle and oracle[key][1] <= clock.now:
                del oracle[key]
            if key in oracle:
                oracle.move_to_end(key)
            assert cache.get(key) == (oracle[key][0] if key in oracle else None)
    assert cache.nbytes == sum(_size_of(answer) for answer, _ in oracle.values())


_Call = st.tuples(
    st.sampled_from(["get", "put", "put alike", "wait"]),
    st.lists(st.integers(0, 6), min_size=1, max_size=8),
    st.integers(1, 8),
)


@given(st.lists(_Call, max_size=40), st.integers(1, 4), st.sampled_from([3_000, _ROOM]))
def test_many_keys_at_once_are_as_one_after_another(calls: list[tuple[str, list[int], int]], capacity: int, room: int):
    """The same answers, the same entries in the same order of use, and the same counts."""
    clock = _Clock()
    together, singly = L1Cache(capacity, room, clock), L1Cache(capacity, room, clock)
    for call, numbers, seconds in calls:
        keys = [bytes([number]) for number in numbers]
        if call == "wait":
            clock.now += seconds
        elif call != "get":
            answers = [_answer(key * seconds) for key in keys]
            if call == "put":
                together.put_all(zip(keys, answers, strict=True), seconds)
            else:
                together.put_alike(keys, answers, seconds)
            for key, answer in zip(keys, answers, strict=True):
                singly.put(key, answer, seconds)
        else:
            assert together.get_all(keys) == [singly.get(key) for key in keys]
        assert list(together._entries.items()) == list(singly._entries.items())
        assert (together.nbytes, together.evicted) == (singly.nbytes, singly.evicted)


@pytest.mark.parametrize("steps", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_threads_do_not_corrupt_it(steps: int):
    """Eight threads with 100,000 steps each: no answer under another key, no bound exceeded (AR-057)."""
    cache = L1Cache(500, 700_000)
    wrong: list[bytes] = []

    def use(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(steps):
            key = rng.randrange(1000).to_bytes(2, "big")
            if (chance := rng.random()) < 0.6:
                if (found := cache.get(key)) is not None and not bytes(found.body).startswith(key):
                    wrong.append(key)
            elif chance < 0.9999:
                cache.put(key, _answer(key * rng.randrange(1, 300), "ab"[key[1] % 2] * 64), 60)
            else:
                cache.forget("a" * 64)

    threads = [threading.Thread(target=use, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 0 < len(cache) <= 500
    assert cache.nbytes <= 700_000
    cache.forget("a" * 64)
    cache.forget("b" * 64)
    assert (len(cache), cache.nbytes) == (0, 0)


def test_memory_stays_within_its_bound():
    """Its own count is at least the memory that Python uses for the entries (CF-018)."""
    cache = L1Cache(10_000, 1 << 28)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(10_001):
        tensor = Tensor("y", "float32", (1, 384))
        cache.put(number.to_bytes(16, "big"), EncodedOutputs((tensor,), bytes(1536), "a" * 64, 0), 60)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert len(cache) == 10_000
    assert taken <= cache.nbytes <= 2 * taken


def test_many_outputs_count_with_their_memory():
    """The descriptions of 64 small tensors are larger than their values."""
    outputs = {f"output_{number}": np.zeros((1, 1, 1), np.uint8) for number in range(64)}
    cache = L1Cache(1_000_000, 4 << 20)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(2_000):
        cache.put(number.to_bytes(16, "big"), EncodedOutputs(*encode(outputs), "a" * 64, 0), 60)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert taken <= cache.nbytes <= 4 << 20
