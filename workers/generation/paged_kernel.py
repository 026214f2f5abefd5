"""Attention of decoding rows over pages in one kernel: nothing is gathered, and no table of what is visible is made.

    program (row, head of the keys): its queries (G, D) -> blocks of keys and values, by their pages -> (G, Dv)

The keys of a row are read through its page table (Kwon et al. 2023, PagedAttention, section 4.1). The softmax is
computed as they come: a running maximum, and a sum that shrinks when the maximum grows (Milakov and Gimelshein 2018;
Dao et al. 2022, FlashAttention, section 3.1). One query sees one range of keys, so a window and a chunk are its start.
A sink is a logit without a value (Xiao et al. 2023): the sum starts with it.

Importing this module imports triton. With TRITON_INTERPRET=1 the kernel runs on a CPU, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.workers.generation.attention import RowGroup
from penstock.workers.generation.layer_rules import LayerRule

__all__ = ["decode_attention", "decode_kernel"]

_BLOCK = 64
"""Keys that are read at a time."""
_LEAST = 16
"""The tensor cores multiply no smaller sides."""


# The width changes with the longest row, and no code depends on it.
@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    queries, keys, values, numbers, starts, positions, sinks, found,
    width, scale, softcap,
    PAGE: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, PER_KEY: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    row, shared = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = shared * PER_KEY + tl.arange(0, GROUP)
    is_head = tl.arange(0, GROUP) < PER_KEY
    in_key, in_value, block = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK)
    query_at = queries + (row * HEADS + heads[:, None]) * D + in_key[None, :]
    query = tl.load(query_at, mask=is_head[:, None] & (in_key[None, :] < D), other=0.0)
    position, start = tl.load(positions + row), tl.load(starts + row)
    first = start
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position - position % CHUNK)
    if HAS_SINKS:
        highest = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        total = tl.full([GROUP], 1.0, tl.float32)
    else:
        highest = tl.full([GROUP], float("-inf"), tl.float32)
        total = tl.zeros([GROUP], tl.float32)
    summed = tl.zeros([GROUP, BLOCK_DV], tl.float32)
    for begin in range(first, position + 1, BLOCK):
        at = begin + block
        is_seen = at <= position
        page = tl.load(numbers + row * width + (at - start) // PAGE, mask=is_seen, other=0)
        slot = (page * PAGE + (at - start) % PAGE) * SHARED + shared
        key_at = keys + slot[None, :] * D + in_key[:, None]
        key = tl.load(key_at, mask=is_seen[None, :] & (in_key[:, None] < D), other=0.0)
        logits = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_CAP:
            # tanh(x) = 2 sigmoid(2 x) - 1
            logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        shrink = tl.exp(highest - higher)
        weights = tl.exp(logits - higher[:, None])
        value_at = values + slot[:, None] * DV + in_value[None, :]
        value = tl.load(value_at, mask=is_seen[:, None] & (in_value[None, :] < DV), other=0.0)
        summed = summed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
    found_at = found + (row * HEADS + heads[:, None]) * DV + in_value[None, :]
    is_found = is_head[:, None] & (in_value[None, :] < DV)
    tl.store(found_at, (summed / total[:, None]).to(found.dtype.element_ty), mask=is_found)


def decode_attention(
    group: RowGroup,
    rule: LayerRule,
    queries: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """queries: (B, H, D), one of each row. pools: (pages, page_size, KV, D) and (.., Dv). Returns (B, H, Dv)."""
    rows, heads, size = queries.shape
    keys, values = pools
    _, page_size, shared, value_size = values.shape
    view = group.views[rule]
    found = queries.new_empty((rows, heads, value_size))
    # Triton launches on the thread's current GPU.
    with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
        decode_kernel[(rows, shared)](
            queries.contiguous(),
            keys,
            values,
            view.numbers,
            view.starts,
            group.first_positions,
            queries if sinks is None else sinks,
            found,
            view.numbers.shape[0] // rows,
            scale,
            0.0 if softcap is None else softcap,
            PAGE=page_size,
            HEADS=heads,
            SHARED=shared,
            PER_KEY=heads // shared,
            D=size,
            DV=value_size,
            WINDOW=rule.window or 0,
            CHUNK=rule.chunk or 0,
            HAS_CAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            GROUP=max(_LEAST, triton.next_power_of_2(heads // shared)),
            BLOCK=_BLOCK,
            BLOCK_D=max(_LEAST, triton.next_power_of_2(size)),
            BLOCK_DV=max(_LEAST, triton.next_power_of_2(value_size)),
        )
    return found
