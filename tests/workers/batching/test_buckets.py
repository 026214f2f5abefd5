"""Length buckets and the arithmetic of padding."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.errors import InvalidInput
from penstock.workers.batching.buckets import (
    BatchLoad,
    LengthBuckets,
    Room,
    most_efficient_run,
    padded_tokens,
    padding_ratio,
    row_bucket,
)

UNLIMITED = 10**9


@dataclass(frozen=True)
class Item:
    """One job, as far as padding is concerned."""

    rows: int
    length: int
    nbytes: int = 0


items = st.builds(Item, rows=st.integers(1, 4), length=st.integers(0, 300), nbytes=st.integers(0, 50))


def nearest_first(jobs: list[Item], longest: int) -> tuple[list[Item], list[Item]]:
    shorter = sorted((job for job in jobs if job.length < longest), key=lambda job: -job.length)
    return shorter, sorted((job for job in jobs if job.length >= longest), key=lambda job: job.length)


def test_edges_double_with_one_step_between_and_end_at_the_maximum():
    """The edges of a 256-token model are few and end at 256 itself."""
    assert LengthBuckets(256).edges == (8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
    assert LengthBuckets(100).edges == (8, 16, 24, 32, 48, 64, 96, 100)
    assert LengthBuckets(5).edges == (5,)


def test_declared_edges_take_the_place_of_ours_and_end_at_the_maximum():
    """Declared buckets are kept, and longer rows have a bucket too."""
    assert LengthBuckets(256, (10, 20)).edges == (10, 20, 256)
    assert LengthBuckets(20, (10, 20, 40)).edges == (10, 20)


@given(rows=st.integers(1, 300), most=st.integers(1, 200))
def test_rows_are_padded_to_few_numbers_and_less_than_doubled(rows: int, most: int):
    """Up to `most` rows, as many numbers of rows as it has binary digits are met; beyond it none is changed."""
    bucket = row_bucket(rows, most)
    if rows > most:
        assert bucket == rows
    else:
        assert rows <= bucket < 2 * rows or bucket == rows == 1
        assert bucket in {most, *(1 << power for power in range(most.bit_length()))}


@given(longest=st.integers(1, 5000), data=st.data())
def test_a_bucket_is_the_smallest_edge_that_holds_the_length(longest: int, data: st.DataObject):
    """Every length up to the maximum has a bucket: an edge that holds it, none smaller does, and little is padded."""
    buckets = LengthBuckets(longest)
    length = data.draw(st.integers(0, longest))
    edge = buckets.bucket(length)
    assert edge in buckets.edges
    assert length <= edge <= longest
    assert not [other for other in buckets.edges if length <= other < edge]
    if length >= 16:
        assert edge < 1.5 * length


def test_a_length_beyond_the_last_edge_is_refused():
    """The error says how long the input may be."""
    with pytest.raises(InvalidInput, match=r"Input of 257 tokens is too long\. Expected at most 256"):
        LengthBuckets(256).bucket(257)


def test_the_padding_ratio_is_the_share_of_computed_tokens_that_is_padding():
    """Rows of 10 and 30 tokens, padded to 30: a third of the 60 tokens is padding."""
    assert padding_ratio(padded_tokens(2, 30), 40) == pytest.approx(1 / 3)
    assert padding_ratio(0, 0) == 0.0


@given(
    base=items,
    jobs=st.lists(items, max_size=8),
    room=st.builds(Room, st.integers(1, 12), st.integers(1, 2000), st.integers(1, 200)),
    overhead_tokens=st.integers(1, 500),
)
def test_no_run_that_fits_is_more_efficient_than_the_one_chosen(
    base: Item, jobs: list[Item], room: Room, overhead_tokens: int
):
    """Against all runs tried one by one, the chosen one fits and has the highest share of real tokens."""
    shorter, longer = nearest_first(jobs, base.length)
    load = BatchLoad(base.rows, base.length, base.nbytes, base.rows * base.length)

    def efficiency(i: int, j: int) -> float:
        run = [base, *shorter[:i], *longer[:j]]
        rows = sum(job.rows for job in run)
        padded = rows * max(job.length for job in run)
        fits = rows <= room.rows and padded <= room.tokens and sum(job.nbytes for job in run) <= room.nbytes
        real = sum(job.rows * job.length for job in run)
        return real / (padded + overhead_tokens) if fits else 0.0

    chosen = most_efficient_run(load, shorter, longer, room, overhead_tokens)
    best = max(efficiency(i, j) for i, j in product(range(len(shorter) + 1), range(len(longer) + 1)))
    assert efficiency(*chosen) == pytest.approx(best)
    if best == 0.0:
        assert chosen == (0, 0)


def test_costlier_forwards_make_fuller_batches():
    """With a cheap forward two lengths run apart; with an expensive one they share a batch."""
    shorter, longer = nearest_first([Item(1, 10)] * 8, 200)
    base, room = BatchLoad(rows=1, longest=200, nbytes=0, tokens=200), Room(64, UNLIMITED, UNLIMITED)
    assert most_efficient_run(base, shorter, longer, room, overhead_tokens=32) == (0, 0)
    assert most_efficient_run(base, shorter, longer, room, overhead_tokens=10_000) == (8, 0)
