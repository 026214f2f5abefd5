"""Attention over pages, as a function that the models of transformers call.

    model(input_ids (1, T), position_ids (1, T)) -> each layer calls `paged_attention` with its queries, keys, values
        keys and values (T, KV, D) -> written to the layer's pages
        each group of rows         -> its pages gathered, one call of SDPA; or the kernel of `paged_kernel`

The tables of a step come from a context variable, because the model's own code passes nothing through. Models are
switched over by `set_attn_implementation(NAME)`; no mask is known under the name, so transformers builds none.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from penstock.workers.generation.huge_pages import zeros
from penstock.workers.generation.layer_rules import LayerRule

__all__ = [
    "COMPILED_NAME",
    "DecodeKernel",
    "KeyValuePools",
    "LayerPool",
    "NAME",
    "NewTokens",
    "RowGroup",
    "StepContext",
    "View",
    "in_step",
    "register",
]

NAME: Final = "penstock_paged"
COMPILED_NAME: Final = "penstock_paged_opaque"
"""The same function, into which torch's compiler does not look."""
_SCRATCH_BYTES: Final = 8_000_000
"""More is gathered into new memory: so much is kept for as long as the engine."""


class View(NamedTuple):
    """Pages of a group of rows, on the device. numbers: (B * P,). starts: (B,), the position of each row's first key.

    length: of the keys that are read of each row. is_masked: whether any query does not see all of them.
    """

    numbers: torch.Tensor
    starts: torch.Tensor
    length: int
    is_masked: bool


class NewTokens(NamedTuple):
    """What a step adds to the pages of a layer. keys, values: (T, KV, D) and (T, KV, Dv).

    slots: (T,), page * page_size + offset.
    """

    keys: torch.Tensor
    values: torch.Tensor
    slots: torch.Tensor

    def part(self, span: slice) -> NewTokens:
        """Some of the tokens."""
        return NewTokens(*(each[span] for each in self))


class LayerPool:
    """Keys and values of one layer, in pages.

    On a CPU those of a token lie side by side, so that one read gathers both, into memory that is used again: it stays
    in the processor's cache, and asks the system for nothing.
    """

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, num_pages: int, page_size: int) -> None:
        """keys, values: (T, KV, D) and (T, KV, Dv), which show shapes, dtype and device. All pages are zeros."""
        self._widths: Final = (keys.shape[-1], values.shape[-1])
        widths = self._widths if keys.is_cuda else (sum(self._widths),)
        self._stored: Final = [zeros((num_pages, page_size, keys.shape[1], width), keys) for width in widths]
        halves = self._halves(self._stored)
        self.keys: Final = halves[0]
        """(pages, page_size, KV, D)"""
        self.values: Final = halves[1]
        """(pages, page_size, KV, Dv)"""

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page."""
        return sum(one[0].nbytes for one in self._stored)

    def write(self, new: NewTokens) -> None:
        """Puts them into the pages."""
        rows = (new.keys, new.values) if len(self._stored) > 1 else (torch.cat((new.keys, new.values), -1),)
        for stored, each in zip(self._stored, rows, strict=True):
            stored.view(-1, *stored.shape[2:]).index_copy_(0, new.slots, each)

    def gather(
        self, numbers: torch.Tensor, rows: int, length: int, scratch: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pages of B rows -> (B, KV, L, D) and (B, KV, L, Dv). numbers: (B * P,).

        scratch: flat memory, which the tensors may use. `index_select` over flat pages took a quarter of the time of
        indexing.
        """
        found = []
        for stored in self._stored:
            flat = stored.view(len(stored), -1)
            into = None
            if scratch is not None and (size := len(numbers) * flat.shape[1]) <= len(scratch):
                into = scratch[:size].view(len(numbers), -1)
            pages = torch.index_select(flat, 0, numbers, out=into)
            found.append(pages.view(rows, -1, *stored.shape[2:])[:, :length].transpose(1, 2))
        return self._halves(found)

    def clear(self, pages: torch.Tensor) -> None:
        """Zeros."""
        for stored in self._stored:
            stored.index_fill_(0, pages, 0)

    def _halves(self, stored: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = stored if len(stored) > 1 else stored[0].split_with_sizes(self._widths, -1)
        return keys, values


class KeyValuePools:
    """Keys and values of all layers. The pool of a layer is made when it is first called."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.num_pages: Final = num_pages
        self.page_size: Final = page_size
        self._layers: dict[int, LayerPool] = {}
        self._scratch: torch.Tensor | None = None

    @property
    def page_nbytes(self) -> int:
        """Bytes of one page in all layers that were called."""
        return sum(pool.page_nbytes for pool in self._layers.values())

    def of(self, layer: int, like: NewTokens) -> LayerPool:
        """The pool of the layer. like: shows shapes, dtype and device."""
        pool = self._layers.get(layer)
        if pool is None:
            pool = self._layers[layer] = LayerPool(like.keys, like.values, self.num_pages, self.page_size)
        return pool

    def scratch(self, like: torch.Tensor) -> torch.Tensor | None:
        """Flat memory on a CPU, for what one call of the attention gathers; the next call overwrites it."""
        if like.is_cuda:
            return None
        if self._scratch is None or self._scratch.dtype != like.dtype:
            self._scratch = like.new_empty(_SCRATCH_BYTES // like.element_size())
        return self._scratch

    def clear(self, pages: Sequence[int]) -> None:
        """Zeros: a masked NaN in a page would spoil the request that has the page next."""
        if not self._layers:
            return
        index = torch.tensor(pages, device=next(iter(self._layers.values())).keys.device)
        # The pools were made in inference mode, and can be written in it only.
        with torch.inference_mode():
            for pool in self._layers.values():
                pool.clear(index)


@dataclass(slots=True)
class RowGroup:
    """B rows with Q queries each, side by side in the flat batch from `start` on. Its tensors are on the device."""

    start: int
    num_rows: int
    num_queries: int
    first_positions: torch.Tensor
    """(B,): of the first query of each row."""
    is_whole_prompt: bool
    """Whether it is one row from position 0 on, so that all keys of its queries are in this batch."""
    views: Mapping[LayerRule, View]
    """The pages that the queries see under each rule of the model."""
    _biases: dict[LayerRule, torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.num_rows * self.num_queries

    def is_causal_alone(self, rule: LayerRule) -> bool:
        """Whether all visible keys are in this batch, and causality alone hides any."""
        return self.is_whole_prompt and (rule.reach is None or self.num_queries <= rule.reach)

    def bias(self, rule: LayerRule, dtype: torch.dtype) -> torch.Tensor | None:
        """(B, 1, Q, L): minus infinity where a query does not see a key; None where each sees all.

        Made once for each rule in a step, on the device and without a look at a value.
        """
        if not self.views[rule].is_masked:
            return None
        if rule not in self._biases:
            self._biases[rule] = self._build_bias(rule, dtype)
        return self._biases[rule]

    def _build_bias(self, rule: LayerRule, dtype: torch.dtype) -> torch.Tensor:
        view, device = self.views[rule], self.first_positions.device
        keys = (view.starts[:, None] + torch.arange(view.length, device=device))[:, None, :]
        queries = (self.first_positions[:, None] + torch.arange(self.num_queries, device=device))[:, :, None]
        visible = keys <= queries
        if rule.window is not None:
            visible &= keys > queries - rule.window
        if rule.chunk is not None:
            visible &= keys // rule.chunk == queries // rule.chunk
        bias = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill_(~visible, float("-inf"))
        return bias[:, None]


class DecodeKernel(Protocol):
    """Attention of the rows of a group with one query each: (B, H, D) -> (B, H, Dv). It writes the new tokens."""

    def __call__(
        self,
        group: RowGroup,
        rule: LayerRule,
        queries: torch.Tensor,
        new: NewTokens,
        pool: LayerPool,
        scale: float,
        softcap: float | None,
        sinks: torch.Tensor | None,
        /,
    ) -> torch.Tensor: ...


@dataclass(slots=True)
class StepContext:
    """What the attention of one step needs. calls: layers in the order in which they called."""

    pools: KeyValuePools
    rules: Sequence[LayerRule]
    slots: torch.Tensor
    groups: Sequence[RowGroup]
    kernel: DecodeKernel | None = None
    """For groups of one query each; None: their pages are gathered."""
    calls: list[int] = field(default_factory=list)
    num_kernel_rows: int = field(init=False)
    """The first rows of the batch, whose new keys and values the kernel writes."""

    def __post_init__(self) -> None:
        self.num_kernel_rows = sum([group.num_rows for group in self.groups if self.attends_by_kernel(group)])

    def attends_by_kernel(self, group: RowGroup) -> bool:
        """Whether the kernel computes these rows, and writes their new keys and values."""
        return self.kernel is not None and group.num_queries == 1


_context: ContextVar[StepContext] = ContextVar("penstock_generation_step")


@contextmanager
def in_step(context: StepContext) -> Iterator[None]:
    """Inside of it a model's forward reads and writes the pages of this step."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def register() -> None:
    """Makes the function known to transformers."""
    AttentionInterface.register(NAME, paged_attention)
    AttentionInterface.register(COMPILED_NAME, torch.compiler.disable(paged_attention))  # type: ignore[no-untyped-call]


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """query: (1, H, T, D); key: (1, KV, T, D); value: (1, KV, T, Dv). Returns (1, T, H, Dv).

    softcap: bound of the logits. s_aux: (H,), a logit that takes probability and gives nothing.
    """
    context = _context.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    context.calls.append(layer)
    rule = context.rules[layer]
    queries, keys, values = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)
    new = NewTokens(keys, values, context.slots)
    pool = context.pools.of(layer, new)
    if (by_kernel := context.num_kernel_rows) < len(context.slots):
        pool.write(new.part(slice(by_kernel, None)) if by_kernel else new)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    extras = None if softcap is None and s_aux is None else _Extras(softcap, s_aux)
    parts = []
    for group in context.groups:
        span = slice(group.start, group.start + group.num_tokens)
        if extras is None and group.is_causal_alone(rule):
            parts.append(_causal(queries[span], keys[span], values[span], scale))
        elif context.kernel is not None and context.attends_by_kernel(group):
            parts.append(context.kernel(group, rule, queries[span], new.part(span), pool, scale, softcap, s_aux))
        else:
            view = group.views[rule]
            pages = pool.gather(view.numbers, group.num_rows, view.length, context.pools.scratch(keys))
            parts.append(_gathered(group, rule, queries[span], pages, scale, extras))
    return (parts[0] if len(parts) == 1 else torch.cat(parts))[None], None


@dataclass(frozen=True, slots=True)
class _Extras:
    """What SDPA does not know."""

    softcap: float | None
    sinks: torch.Tensor | None


def _causal(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    """(n, H, D), (n, KV, D), (n, KV, Dv) -> (n, H, Dv): a whole prompt, straight from the batch."""
    repeats = queries.shape[1] // keys.shape[1]
    if repeats > 1:
        keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    query, key, value = (each.transpose(0, 1)[None] for each in (queries, keys, values))
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)[0].transpose(0, 1)


def _gathered(
    group: RowGroup,
    rule: LayerRule,
    queries: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    extras: _Extras | None,
) -> torch.Tensor:
    """(B * Q, H, D) -> (B * Q, H, Dv). Queries that share a head of the keys lie side by side: nothing is repeated.

    pages: keys (B, KV, L, D) and values (B, KV, L, Dv).
    """
    rows, number, heads = group.num_rows, group.num_queries, queries.shape[1]
    bias = group.bias(rule, queries.dtype)
    keys, values = pages
    _, shared, length, _ = keys.shape
    per_key = heads // shared
    packed = queries.reshape(rows, number, shared, per_key, -1).permute(0, 2, 3, 1, 4)
    packed = packed.reshape(rows, shared, per_key * number, -1)
    if bias is not None and number > 1:
        bias = bias[:, :, None].expand(-1, -1, per_key, -1, -1).reshape(rows, 1, per_key * number, length)
    if extras is None:
        found = scaled_dot_product_attention(packed, keys, values, attn_mask=bias, scale=scale)
    else:
        found = _plain(packed, keys, values, bias, scale, extras)
    found = found.reshape(rows, shared, per_key, number, -1).permute(0, 3, 1, 2, 4)
    return found.reshape(rows * number, heads, -1)


def _plain(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    bias: torch.Tensor | None,
    scale: float,
    extras: _Extras,
) -> torch.Tensor:
    """The formula itself, for capped logits and sinks. queries: (B, KV, G * Q, D)."""
    logits = queries @ keys.transpose(2, 3) * scale
    if extras.softcap is not None:
        logits = torch.tanh(logits / extras.softcap) * extras.softcap
    if bias is not None:
        logits = logits + bias
    if extras.sinks is None:
        return logits.softmax(-1, dtype=torch.float32).to(values.dtype) @ values
    rows, shared, packed, _ = logits.shape
    sinks = extras.sinks.view(1, shared, -1, 1).to(logits.dtype)
    sinks = sinks.repeat_interleave(packed // sinks.shape[2], 2).expand(rows, -1, -1, 1)
    weights = torch.cat((logits, sinks), -1).softmax(-1, dtype=torch.float32)[..., :-1]
    return weights.to(values.dtype) @ values
