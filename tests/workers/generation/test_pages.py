"""Pages and the prefix cache against oracles: no double use, no leak, the least recently used goes first."""

from __future__ import annotations

import random

import pytest

from penstock.workers.generation.pages import PagePool
from penstock.workers.generation.prefix_cache import PrefixCache


def test_random_allocations_neither_leak_nor_double():
    """ES-001, ES-013: a thousand requests take and give back pages, and an oracle knows who has which."""
    chosen = random.Random(0)
    pool = PagePool(40, 16, None)
    held: list[list[int]] = []
    for _ in range(1_000):
        number = chosen.randrange(0, 12)
        taken = pool.allocate(number)
        free = 39 - sum(map(len, held))
        assert (taken is None) == (number > free)
        if taken is not None:
            held.append(taken)
        if held and chosen.random() < 0.6:
            pool.release(held.pop(chosen.randrange(len(held))))
        used = [page for pages in held for page in pages]
        assert len(set(used)) == len(used)
        assert 0 not in used
        assert pool.num_used == len(used)
    for pages in held:
        pool.release(pages)
    assert pool.num_available == pool.num_usable == 39


def fill(pool: PagePool, tokens: list[int], tenant: str = "") -> list[int]:
    """A request that computes these tokens and publishes its full pages."""
    pages = pool.allocate(pool.pages_for(len(tokens))) or []
    parent: int | None = 0
    for at in range(len(tokens) // pool.page_size):
        if parent is not None:
            parent = pool.publish(parent, tokens[at * pool.page_size : (at + 1) * pool.page_size], tenant, pages[at])
    return pages


def test_equal_pages_behind_unequal_ones_are_not_confused():
    """The same tokens at the same place are another page where the beginning was another."""
    pool = PagePool(20, 2, prefixes := PrefixCache(2, 20))
    fill(pool, [1, 2, 9, 9])
    fill(pool, [3, 4, 9, 9])
    found = [[entry.page for entry in prefixes.match([*start, 9, 9, 5], "")] for start in ([1, 2], [3, 4], [5, 6])]
    assert [len(pages) for pages in found] == [2, 2, 0]
    assert not set(found[0]) & set(found[1])


def test_the_last_token_is_always_left_to_compute():
    """A full hit leaves a page out: logits come from computed tokens only."""
    pool = PagePool(20, 2, prefixes := PrefixCache(2, 20))
    fill(pool, [1, 2, 3, 4])
    assert len(prefixes.match([1, 2, 3, 4], "")) == 1
    assert len(prefixes.match([1, 2, 3, 4, 5], "")) == 2


def test_the_page_that_was_idle_longest_goes_first():
    """ES-014: least recently used first, and of one request its end before its beginning."""
    pool = PagePool(7, 2, prefixes := PrefixCache(2, 6))
    old, young = fill(pool, [1, 1, 2, 2]), fill(pool, [3, 3, 4, 4])
    pool.release(old)
    pool.release(young)
    assert pool.num_available == 6
    pool.allocate(3)
    assert [len(prefixes.match(tokens, "")) for tokens in ([1, 1, 2, 2, 0], [3, 3, 4, 4, 0])] == [1, 2]
    pool.allocate(1)
    assert [len(prefixes.match(tokens, "")) for tokens in ([1, 1, 2, 2, 0], [3, 3, 4, 4, 0])] == [0, 2]


def test_a_used_page_makes_it_young_again():
    """A page that was found and given back is idle for the shortest time."""
    pool = PagePool(7, 2, prefixes := PrefixCache(2, 6))
    for tokens in ([1, 1], [2, 2], [3, 3]):
        pool.release(fill(pool, tokens))
    pool.release(pool.share(prefixes.match([1, 1, 0], "")))
    pool.allocate(4)
    assert [len(prefixes.match([token, token, 0], "")) for token in (1, 2, 3)] == [1, 0, 1]


@pytest.mark.parametrize("capacity", [0, 1, 3])
def test_capacity_bounds_the_known_pages(capacity):
    """ES-027: no more pages are kept, and those that are in use are never given up."""
    pool = PagePool(20, 2, prefixes := PrefixCache(2, capacity))
    held = [fill(pool, [token, token]) for token in range(1, 6)]
    assert len(prefixes) == capacity
    for pages in held:
        pool.release(pages)
    fill(pool, [9, 9])
    assert len(prefixes) == capacity
    assert pool.num_available == 18
    assert len(prefixes.match([9, 9, 0], "")) == min(1, capacity)
