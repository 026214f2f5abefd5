"""Attention of decoding rows over pages in one kernel: nothing is gathered, and no table of what is visible is made.

    program (row, head of the keys): its new key and value -> their page
        its queries (G, D) -> the new key, then blocks of earlier keys and values, by their pages -> (G, Dv)
    few rows: program (row, head, part of the keys) -> sums of the part -> merged by their maxima -> (G, Dv)

The keys of a row are read through its page table (Kwon et al. 2023, PagedAttention, section 4.1). The softmax is
computed as they come: a running maximum, and a sum that shrinks when the maximum grows (Milakov and Gimelshein 2018;
Dao et al. 2022, FlashAttention, section 3.1). One query sees one range of keys, so a window and a chunk are its start.
A sink is a logit without a value (Xiao et al. 2023): the sum starts with it, and with the new key. No program reads
from a page what this call writes.

Importing this module imports triton. With TRITON_INTERPRET=1 the kernel runs on a CPU, for tests.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from penstock.workers.generation.attention import LayerPool, NewTokens, RowGroup
from penstock.workers.generation.layer_rules import LayerRule

__all__ = ["decode_attention", "decode_kernel", "merge_kernel", "splits_of"]

_BLOCKS = (128, 64)
"""Keys that are read at a time: of small heads, and of others, so that two blocks of each fit the shared memory."""
_SMALL_BYTES = 128
_WARPS, _STAGES = 4, 2
"""With blocks of 128 keys, the fastest of 18 settings on an H200 for 64 and 8 rows of 600 keys of 64 bf16 numbers."""
_LEAST = 16
"""The tensor cores multiply no smaller sides."""
_PROGRAMS = 512
"""So many keep a large GPU busy: about four for each of its multiprocessors."""
_MOST_SPLITS = 16


# The width changes with the longest row, and no code depends on it.
@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    queries, new_keys, new_values, slots, keys, values, numbers, starts, positions, sinks, found, sums,
    width, scale, softcap, key_row, key_head, value_row, value_head,
    PAGE: tl.constexpr, HEADS: tl.constexpr, SHARED: tl.constexpr, PER_KEY: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, KEYS_APART: tl.constexpr, VALUES_APART: tl.constexpr,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    SPLITS: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
):  # fmt: skip
    row, shared, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    heads = shared * PER_KEY + tl.arange(0, GROUP)
    is_head = tl.arange(0, GROUP) < PER_KEY
    in_key, in_value, block = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK)
    query_at = queries + (row * HEADS + heads[:, None]) * D + in_key[None, :]
    query = tl.load(query_at, mask=is_head[:, None] & (in_key[None, :] < D), other=0.0)
    own_key = tl.load(new_keys + row * key_row + shared * key_head + in_key, mask=in_key < D, other=0.0)
    own_value = tl.load(new_values + row * value_row + shared * value_head + in_value, mask=in_value < DV, other=0.0)
    own_slot = tl.load(slots + row) * SHARED + shared
    tl.store(keys + own_slot * KEYS_APART + in_key, own_key, mask=(in_key < D) & (split == 0))
    tl.store(values + own_slot * VALUES_APART + in_value, own_value, mask=(in_value < DV) & (split == 0))
    position, start = tl.load(positions + row), tl.load(starts + row)
    first = start
    if WINDOW > 0:
        first = tl.maximum(first, position - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, position - position % CHUNK)
    end = position
    if SPLITS > 1:
        blocks = tl.cdiv(position - first, BLOCK)
        number = tl.cdiv(blocks, SPLITS) * BLOCK
        first += split * number
        end = tl.minimum(position, first + number)
    highest = tl.sum(query.to(tl.float32) * own_key.to(tl.float32)[None, :], 1) * scale
    if HAS_CAP:
        # tanh(x) = 2 sigmoid(2 x) - 1
        highest = softcap * (2.0 * tl.sigmoid(2.0 * highest / softcap) - 1.0)
    total = tl.full([GROUP], 1.0, tl.float32)
    summed = tl.broadcast_to(own_value.to(tl.float32)[None, :], (GROUP, BLOCK_DV))
    if HAS_SINKS:
        sink = tl.load(sinks + heads, mask=is_head, other=0.0).to(tl.float32)
        higher = tl.maximum(highest, sink)
        summed *= tl.exp(highest - higher)[:, None]
        total = tl.exp(highest - higher) + tl.exp(sink - higher)
        highest = higher
    if SPLITS > 1:
        # The first part has the new key and the sink.
        highest = tl.where(split == 0, highest, float("-inf"))
        total = tl.where(split == 0, total, 0.0)
        summed = tl.where(split == 0, summed, 0.0)
    for begin in range(first, end, BLOCK):
        at = begin + block
        is_seen = at < end
        page = tl.load(numbers + row * width + (at - start) // PAGE, mask=is_seen, other=0)
        slot = (page * PAGE + (at - start) % PAGE) * SHARED + shared
        key_at = keys + slot[None, :] * KEYS_APART + in_key[:, None]
        key = tl.load(key_at, mask=is_seen[None, :] & (in_key[:, None] < D), other=0.0)
        logits = tl.dot(query, key, input_precision="ieee") * scale
        if HAS_CAP:
            logits = softcap * (2.0 * tl.sigmoid(2.0 * logits / softcap) - 1.0)
        logits = tl.where(is_seen[None, :], logits, float("-inf"))
        higher = tl.maximum(highest, tl.max(logits, 1))
        shrink = tl.exp(highest - higher)
        weights = tl.exp(logits - higher[:, None])
        value_at = values + slot[:, None] * VALUES_APART + in_value[None, :]
        value = tl.load(value_at, mask=is_seen[:, None] & (in_value[None, :] < DV), other=0.0)
        summed = summed * shrink[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        total = total * shrink + tl.sum(weights, 1)
        highest = higher
    is_found = is_head[:, None] & (in_value[None, :] < DV)
    if SPLITS == 1:
        found_at = found + (row * HEADS + heads[:, None]) * DV + in_value[None, :]
        tl.store(found_at, (summed / total[:, None]).to(found.dtype.element_ty), mask=is_found)
    else:
        part = (row * SPLITS + split) * HEADS + heads
        tl.store(found + part[:, None] * DV + in_value[None, :], summed, mask=is_found)
        tl.store(sums + 2 * part, highest, mask=is_head)
        tl.store(sums + 2 * part + 1, total, mask=is_head)


@triton.jit  # type: ignore[untyped-decorator]
def merge_kernel(  # type: ignore[no-untyped-def]
    parts, sums, found, HEADS: tl.constexpr, DV: tl.constexpr, SPLITS: tl.constexpr, BLOCK_DV: tl.constexpr
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, in_value = tl.arange(0, SPLITS), tl.arange(0, BLOCK_DV)
    part = (row * SPLITS + split) * HEADS + head
    highest, total = tl.load(sums + 2 * part), tl.load(sums + 2 * part + 1)
    # The first part has the new key: the maximum is a number. A part without keys has minus infinity, and the weight 0.
    weights = tl.exp(highest - tl.max(highest, 0))
    is_found = in_value < DV
    summed = tl.load(parts + part[:, None] * DV + in_value[None, :], mask=is_found[None, :], other=0.0)
    mean = tl.sum(summed * weights[:, None], 0) / tl.sum(total * weights, 0)
    tl.store(found + (row * HEADS + head) * DV + in_value, mean.to(found.dtype.element_ty), mask=is_found)


def splits_of(programs: int) -> int:
    """Parts in which the keys of each row are read, a power of two, where so many programs read whole rows.

    Few rows leave most of a GPU idle: their keys are shared out (Dao et al. 2023, Flash-Decoding).
    """
    return min(_MOST_SPLITS, 1 << (max(1, _PROGRAMS // programs).bit_length() - 1))


def decode_attention(
    group: RowGroup,
    rule: LayerRule,
    queries: torch.Tensor,
    new: NewTokens,
    pool: LayerPool,
    scale: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """queries: (B, H, D), one of each row. new: of the same rows; they are written to the pool. Returns (B, H, Dv)."""
    rows, heads, size = queries.shape
    new_keys, new_values = (each if each.stride(-1) == 1 else each.contiguous() for each in new[:2])
    keys, values = pool.keys, pool.values
    _, page_size, shared, value_size = values.shape
    view = group.views[rule]
    found = queries.new_empty((rows, heads, value_size))
    splits = splits_of(rows * shared)
    parts, sums = found, found
    if splits > 1:
        parts = queries.new_empty((rows, splits, heads, value_size), dtype=torch.float32)
        sums = queries.new_empty((rows, splits, heads, 2), dtype=torch.float32)
    block_d, block_dv = (max(_LEAST, triton.next_power_of_2(each)) for each in (size, value_size))
    is_small = max(block_d, block_dv) * keys.element_size() <= _SMALL_BYTES
    # Triton launches on the thread's current GPU.
    with torch.cuda.device_of(queries):  # type: ignore[no-untyped-call]
        decode_kernel[(rows, shared, splits)](
            queries.contiguous(),
            new_keys,
            new_values,
            new.slots,
            keys,
            values,
            view.numbers,
            view.starts,
            group.first_positions,
            queries if sinks is None else sinks,
            parts,
            sums,
            view.numbers.shape[0] // rows,
            scale,
            0.0 if softcap is None else softcap,
            new_keys.stride(0),
            new_keys.stride(1),
            new_values.stride(0),
            new_values.stride(1),
            PAGE=page_size,
            HEADS=heads,
            SHARED=shared,
            PER_KEY=heads // shared,
            D=size,
            DV=value_size,
            KEYS_APART=keys.stride(2),
            VALUES_APART=values.stride(2),
            WINDOW=rule.window or 0,
            CHUNK=rule.chunk or 0,
            HAS_CAP=softcap is not None,
            HAS_SINKS=sinks is not None,
            SPLITS=splits,
            GROUP=max(_LEAST, triton.next_power_of_2(heads // shared)),
            BLOCK=_BLOCKS[0] if is_small else _BLOCKS[1],
            BLOCK_D=block_d,
            BLOCK_DV=block_dv,
            num_warps=_WARPS,
            num_stages=_STAGES,
        )
        if splits > 1:
            merge_kernel[(rows, heads)](
                parts, sums, found, HEADS=heads, DV=value_size, SPLITS=splits, BLOCK_DV=block_dv
            )
    return found
