"""What a CUDA graph of decoding rows needs, as far as a CPU can show it: buckets, padding rows, plans of one size.

The replay itself is in `test_paged_kernel`, by a copy of the plan in the interpreter. No graph is captured here.
"""

from __future__ import annotations

import pytest
import torch

from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.decode_graphs import DecodeGraphs, bucket_of, is_decoding, padded
from penstock.workers.generation.model import wrap_decoder
from penstock.workers.generation.scheduler import Chunk, Sequence
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import open_engine, prompts_of

PAGE_SIZE = 4


@pytest.mark.parametrize(
    ("rows", "expected"), [(1, 1), (2, 2), (3, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 24), (64, 64)]
)
def test_buckets_are_few(rows, expected):
    """The next power of two, and from 8 rows on the next multiple of 8."""
    assert bucket_of(rows) == expected


def test_only_decoding_rows_have_a_graph():
    """A chunk of a prompt, a row with drafts, and a row without logits have other shapes."""
    one = Sequence("one", [1, 2, 3], 3)
    assert is_decoding([Chunk(one, 2, 1)])
    assert not is_decoding([Chunk(one, 2, 1), Chunk(one, 1, 2)])
    assert not is_decoding([Chunk(one, 2, 2, drafts=(5,))])
    assert not is_decoding([Chunk(one, 1, 1)])


@pytest.mark.parametrize("name", ["Llama", "Gemma2", "Llama 4 with chunks"])
@pytest.mark.parametrize("rows", [1, 3, 5])
def test_padding_rows_change_no_logits(name, rows):
    """They come first, write to page 0 only, and leave the pages of the others as they are."""
    loaded = wrap_decoder(decoder(name), None, 64)
    pools = KeyValuePools(100, PAGE_SIZE)
    sequences = [
        Sequence(str(row), prompt, len(prompt)) for row, prompt in enumerate(prompts_of(9, 30, 14, 2, 21)[:rows])
    ]
    for row, one in enumerate(sequences):
        one.pages = [*range(1 + 12 * row, 13 + 12 * row)]
        loaded.forward(loaded.batch([Chunk(one, 0, len(one.tokens) - 1)], PAGE_SIZE), pools)
    steps = [Chunk(one, len(one.tokens) - 1, 1) for one in sequences]
    plain = loaded.batch(steps, PAGE_SIZE)
    expected, _ = loaded.forward(plain, pools)
    batch = loaded.batch(padded(steps, 8), PAGE_SIZE)
    found, _ = loaded.forward(batch, pools)
    assert found.shape[0] == 8
    assert batch.sampling[8 - rows :] == plain.sampling
    assert torch.allclose(found[8 - rows :], expected, atol=1e-5)
    again, _ = loaded.forward(plain, pools)
    assert torch.equal(again, expected)


def test_plans_of_a_bucket_have_one_size():
    """However long its rows are: the tables are as wide as the longest text needs."""
    loaded = wrap_decoder(decoder("Gemma2"), None, 64)
    graphs = DecodeGraphs(loaded, KeyValuePools(100, PAGE_SIZE))
    sizes = set()
    for lengths in ((1, 1, 1), (64, 3, 9), (5, 6, 7, 8)):
        steps = [Chunk(Sequence("", [1] * length, length, pages=[1] * 16), length - 1, 1) for length in lengths]
        sizes.add(tuple(graphs.batch(steps).plan.shape))
    assert len(sizes) == 1


def test_cpu_has_no_graphs():
    """The option says what happens on a GPU."""
    engine = open_engine(decoder("Llama"), kv_cache_mb=4, cuda_graphs=True)
    assert engine.forwards.graphs is None
