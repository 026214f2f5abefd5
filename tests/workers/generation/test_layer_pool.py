"""Pages of keys and values: what is gathered is what was written, and gathering on a CPU takes no new memory."""

from __future__ import annotations

import gc

import pytest
import torch

from penstock.workers.generation.attention import KeyValuePools, LayerPool, NewTokens
from penstock.workers.generation.huge_pages import zeros

PAGES, PAGE_SIZE, HEADS = 7, 4, 2


def rows(width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((PAGES - 1) * PAGE_SIZE, HEADS, width, generator=generator)


def filled(pools: KeyValuePools, new: NewTokens) -> LayerPool:
    pool = pools.of(0, new)
    pool.write(new)
    return pool


@pytest.mark.parametrize("widths", [(8, 8), (12, 8)], ids=["equal widths", "values of another width"])
@pytest.mark.parametrize("has_scratch", [True, False])
def test_gathered_pages_are_those_that_were_written(widths: tuple[int, int], has_scratch: bool):
    """Keys and values of two rows in mixed pages come back in the order of the rows' tables, cut to the length."""
    keys, values = rows(widths[0], 1), rows(widths[1], 2)
    pool = LayerPool(keys, values, PAGES, PAGE_SIZE)
    pool.write(NewTokens(keys, values, torch.arange(PAGE_SIZE, PAGES * PAGE_SIZE)))
    scratch = torch.full((4 * PAGE_SIZE * HEADS * sum(widths),), torch.nan) if has_scratch else None
    found = pool.gather(torch.tensor([5, 2, 1, 6]), 2, 6, scratch)
    for given, gathered in zip((keys, values), found, strict=True):
        pages = given.view(-1, PAGE_SIZE, HEADS, given.shape[-1])
        for row, table in enumerate(((5, 2), (1, 6))):
            expected = torch.cat([pages[page - 1] for page in table])[:6].transpose(0, 1)
            assert torch.equal(gathered[row], expected)


def test_pages_are_gathered_into_memory_that_is_there():
    """A step asks the system for no memory: what fits the scratch is gathered into it, and the rest is new memory."""
    keys, values = rows(8, 1), rows(8, 2)
    pools = KeyValuePools(PAGES, PAGE_SIZE)
    pool = filled(pools, NewTokens(keys, values, torch.arange(PAGE_SIZE, PAGES * PAGE_SIZE)))
    scratch = pools.scratch(keys)
    assert scratch is not None
    assert pools.scratch(keys) is scratch
    span = range(scratch.data_ptr(), scratch.data_ptr() + scratch.nbytes)
    numbers = torch.tensor([3, 4])
    assert all(each.data_ptr() in span for each in pool.gather(numbers, 2, PAGE_SIZE, scratch))
    assert not any(each.data_ptr() in span for each in pool.gather(numbers, 2, PAGE_SIZE, scratch[:100]))


def test_cleared_pages_are_zeros_in_keys_and_values():
    """A page that is cleared has nothing of its last request, and its neighbours keep theirs."""
    keys, values = rows(8, 1), rows(12, 2)
    pools = KeyValuePools(PAGES, PAGE_SIZE)
    pool = filled(pools, NewTokens(keys, values, torch.arange(PAGE_SIZE, PAGES * PAGE_SIZE)))
    pools.clear([3])
    for stored in (pool.keys, pool.values):
        assert not stored[3].any()
        assert stored[2].all()
        assert stored[4].all()
    assert pools.page_nbytes == PAGE_SIZE * HEADS * (8 + 12) * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("number", [64, 300_000], ids=["small", "many pages"])
def test_zeros_are_whole_and_stay(dtype: torch.dtype, number: int):
    """Zeros of the shape and dtype that were asked for, which can be written and outlive everything else."""
    made = zeros((number, 2, 5), torch.empty(0, dtype=dtype))
    gc.collect()
    assert made.shape == (number, 2, 5)
    assert made.dtype == dtype
    assert made.is_contiguous()
    assert not made.any()
    made[-1] = 1
    assert made.sum() == 10


def test_many_zeros_begin_on_a_huge_page():
    """The system has huge pages of 2 MB only from their borders on."""
    assert zeros((1 << 20,), torch.empty(0)).data_ptr() % (2 << 20) == 0
