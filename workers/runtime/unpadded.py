"""A BERT encoder -> the same vectors, computed on tokens without padding, by packed weights.

    slices -> the tokens of all rows, one row after another, in runs of rows of one length
           -> each layer: query, key and value by one product; attention within each run; the rest on all tokens
           -> the mean of each row's tokens, of unit length

Only attention and the mean know rows, so only they need rows of one length. Every other product has all tokens of a
batch as its rows: none of padding, and as many at once as possible. The products are those of prepacked.py.

The code follows one architecture, Devlin et al. 2019 as transformers writes it. So it is used only for that class, with
the parts that are known here, and only if its vectors were those of the model when it was built.

Importing this module imports torch. Only a loaded encoder imports it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final, NamedTuple

import torch
from torch.nn.functional import embedding, layer_norm, scaled_dot_product_attention

from penstock.workers.runtime.compilable import CompilationRefused
from penstock.workers.runtime.prepacked import (
    MOST_PACKED_BYTES,
    Packing,
    PrepackedLinear,
    is_exact_gelu,
    is_plain,
    pack_linears,
    packable,
)

__all__ = ["UnpaddedEncoder"]

_BERT: Final = ("transformers.models.bert.modeling_bert", "BertModel")
_MOST_TOKENS: Final = 2048
"""Tokens of one pass through the layers, which bounds its memory. 512 tokens at a time were as fast with MiniLM."""
_MOST_SCORES: Final = 3 << 19
"""Attention scores of one product in bf16. MiniLM's attention took up to twice as long where they were more."""
_TOLERANCES: Final = {torch.float32: 1e-4, torch.bfloat16: 0.05}
"""Of unit vectors, against the model's. Another architecture differs by more; the gate has its own, narrower limits."""


class _Run(NamedTuple):
    """Rows of one length: `rows` of them, of `length` tokens each, from token `start` on."""

    start: int
    rows: int
    length: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.length


class _Norm(NamedTuple):
    """A layer norm over the last axis."""

    weight: torch.Tensor
    bias: torch.Tensor
    eps: float

    def __call__(self, values: torch.Tensor) -> torch.Tensor:
        return layer_norm(values, self.weight.shape, self.weight, self.bias, self.eps)


class _Layer(NamedTuple):
    """One layer. attend: (tokens, D) -> (tokens, 3 D), queries scaled by the square root of their width."""

    attend: PrepackedLinear
    attended: PrepackedLinear
    attended_norm: _Norm
    widen: PrepackedLinear
    narrow: PrepackedLinear
    norm: _Norm


class UnpaddedEncoder:
    """The forward of a BERT encoder with mean pooling. Several threads may call it: nothing in it changes.

    pooled: an encoder in evaluation mode with its pooling, see Pooled. It is not changed. dtype: of the arithmetic; the
    pooling is done in float32. example: (ids, mask) as `pooled` takes them, on which both must agree. Raises
    CompilationRefused for another kind of encoder, or where torch has no operators for packed weights.
    """

    def __init__(self, pooled: torch.nn.Module, dtype: torch.dtype, example: tuple[torch.Tensor, torch.Tensor]) -> None:
        encoder: Any = pooled.encoder
        if reason := _why_unknown(encoder):
            raise CompilationRefused(f"Expected a BERT encoder of transformers: {reason}")
        self._dtype = dtype
        self._heads = int(encoder.config.num_attention_heads)
        with torch.no_grad():
            parts = encoder.embeddings
            self._words = parts.word_embeddings.weight.to(dtype)
            # All tokens of a text have type 0.
            self._places = (parts.position_embeddings.weight + parts.token_type_embeddings.weight[0]).to(dtype)
            self._norm = _norm(parts.LayerNorm, dtype)
            layers = [self._linears(layer) for layer in encoder.encoder.layer]
        linears = [linear for one in layers for linear in one]
        nbytes = sum(one.weight.nbytes for one in linears)
        if len(packable(torch.nn.ModuleList(linears))) < len(linears):
            raise CompilationRefused("Found linear layers that cannot be packed, expected none")
        if nbytes > MOST_PACKED_BYTES:
            raise CompilationRefused(
                f"The packed weights would take {nbytes / 1e6:.0f} MB, expected at most {MOST_PACKED_BYTES / 1e6:.0f}"
            )
        packed = iter(pack_linears(linears))
        self._layers = [self._layer(layer, packed) for layer in encoder.encoder.layer]
        self.packing: Final = Packing(len(linears), len(layers), nbytes + self._copied_bytes(encoder, linears))
        """What was packed. nbytes: of packed weights, and of those that were joined or cast."""
        self._check(pooled, example)

    def __call__(self, ids: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """ids: (sum of lengths,) int64, the tokens of one row after another -> (rows, D) float32 of unit length."""
        vectors = []
        start = 0
        for part in _parts(lengths):
            stop = start + sum(part)
            vectors.append(self._embed(ids[start:stop], _runs(part)))
            start = stop
        return vectors[0] if len(vectors) == 1 else torch.cat(vectors)

    def _embed(self, ids: torch.Tensor, runs: Sequence[_Run]) -> torch.Tensor:
        """ids: (tokens,), fewer than twice `_MOST_TOKENS` where no row is longer."""
        places = torch.cat([self._places[: run.length].repeat(run.rows, 1) for run in runs])
        hidden = self._norm(places.add_(embedding(ids, self._words)))
        for layer in self._layers:
            attended = self._attention(layer.attend(hidden), runs)
            hidden = layer.attended_norm(layer.attended(attended).add_(hidden))
            hidden = layer.norm(layer.narrow(layer.widen(hidden)).add_(hidden))
        means = [hidden[run.start : run.stop].view(run.rows, run.length, -1).float().mean(1) for run in runs]
        pooled = torch.cat(means)
        unit: torch.Tensor = pooled / pooled.norm(dim=1, keepdim=True).clamp_min(1e-12)
        return unit

    def _attention(self, projected: torch.Tensor, runs: Sequence[_Run]) -> torch.Tensor:
        """projected: (tokens, 3 D) -> (tokens, D), each token attending to its own row."""
        attend = self._in_blocks if self._dtype == torch.bfloat16 else self._in_one
        found = [attend(projected[run.start : run.stop], run) for run in runs]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _in_one(self, projected: torch.Tensor, run: _Run) -> torch.Tensor:
        query, key, value = projected.view(run.rows, run.length, 3, self._heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        attended = scaled_dot_product_attention(query, key, value, scale=1.0)
        return attended.transpose(1, 2).reshape(run.rows * run.length, -1)

    def _in_blocks(self, projected: torch.Tensor, run: _Run) -> torch.Tensor:
        """The same by two batched products for some rows at a time: 1.3 to 1.7 times as fast in bf16 on a CPU."""
        rows = max(1, _MOST_SCORES // (self._heads * run.length * run.length))
        if rows >= run.rows:
            return self._block(projected, run.length)
        tokens = rows * run.length
        starts = range(0, len(projected), tokens)
        return torch.cat([self._block(projected[start : start + tokens], run.length) for start in starts])

    def _block(self, projected: torch.Tensor, length: int) -> torch.Tensor:
        split = projected.view(-1, length, 3, self._heads, projected.shape[1] // (3 * self._heads))
        width = split.shape[-1]
        query, key, value = split.permute(2, 0, 3, 1, 4).reshape(3, -1, length, width).unbind(0)
        attended = torch.bmm(torch.bmm(query, key.transpose(1, 2)).softmax(-1), value)
        return attended.view(-1, self._heads, length, width).transpose(1, 2).reshape(len(projected), -1)

    def _linears(self, layer: Any) -> tuple[torch.nn.Linear, ...]:
        """The layer's four products. The weights that are not joined or cast stay the model's."""
        own = layer.attention.self
        scale = (own.query.out_features // self._heads) ** -0.5
        weight = torch.cat([own.query.weight * scale, own.key.weight, own.value.weight])
        bias = torch.cat([own.query.bias * scale, own.key.bias, own.value.bias])
        others = (layer.attention.output.dense, layer.intermediate.dense, layer.output.dense)
        pairs = [(weight, bias), *((one.weight, one.bias) for one in others)]
        return tuple(_linear(weight.to(self._dtype), bias.to(self._dtype)) for weight, bias in pairs)

    def _layer(self, layer: Any, packed: Iterator[PrepackedLinear]) -> _Layer:
        attend, attended, widen, narrow = (next(packed) for _ in range(4))
        widen.has_gelu = True
        norms = (_norm(one.LayerNorm, self._dtype) for one in (layer.attention.output, layer.output))
        return _Layer(attend, attended, next(norms), widen, narrow, next(norms))

    def _copied_bytes(self, encoder: torch.nn.Module, linears: Sequence[torch.nn.Linear]) -> int:
        """Bytes of the dense weights that are not the encoder's own."""
        own = {one.data_ptr() for one in encoder.parameters()}
        held = [self._words, self._places, *(one.weight for one in linears)]
        return sum(one.nbytes for one in held if one.data_ptr() not in own)

    def _check(self, pooled: torch.nn.Module, example: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Raises CompilationRefused unless the vectors of the example are the model's, up to rounding."""
        ids, mask = example
        with torch.inference_mode():
            expected = pooled(ids, mask)
            found = self(ids[mask.bool()], mask.sum(1).tolist())
        tolerance = _TOLERANCES[self._dtype]
        if found.shape != expected.shape or not torch.allclose(found, expected, rtol=0, atol=tolerance):
            raise CompilationRefused("Found other vectors than the model's, expected the same up to rounding")


def _why_unknown(encoder: Any) -> str:
    """Why this is not the architecture that is computed here; empty where it is."""
    kind = type(encoder)
    if (kind.__module__, kind.__qualname__) != _BERT:
        return f"found {kind.__qualname__}"
    if not all(is_plain(one) for one in encoder.modules()):
        return "found hooks, or a module in training"
    layers = list(encoder.encoder.layer)
    if not layers or getattr(encoder.config, "is_decoder", False):
        return "found a decoder" if layers else "found no layers"
    if not all(is_exact_gelu(layer.intermediate.intermediate_act_fn) for layer in layers):
        return "found another activation than the exact GELU"
    if getattr(encoder.config, "position_embedding_type", "absolute") != "absolute":
        return "found relative positions"
    return ""


def _linear(weight: torch.Tensor, bias: torch.Tensor) -> torch.nn.Linear:
    """A layer with these parameters, which it may share."""
    linear = torch.nn.Linear(1, 1, device="meta")
    linear.out_features, linear.in_features = weight.shape
    linear.weight, linear.bias = (
        one if isinstance(one, torch.nn.Parameter) else torch.nn.Parameter(one, requires_grad=False)
        for one in (weight, bias)
    )
    return linear.eval()


def _norm(module: Any, dtype: torch.dtype) -> _Norm:
    return _Norm(module.weight.detach().to(dtype), module.bias.detach().to(dtype), float(module.eps))


def _parts(lengths: Sequence[int]) -> Iterator[Sequence[int]]:
    """The lengths in their order, cut so that parts have at most `_MOST_TOKENS` tokens each, or one row."""
    start = tokens = 0
    for row, length in enumerate(lengths):
        if tokens and tokens + length > _MOST_TOKENS:
            yield lengths[start:row]
            start, tokens = row, 0
        tokens += length
    yield lengths[start:]


def _runs(lengths: Sequence[int]) -> list[_Run]:
    """Neighbours of one length together."""
    runs: list[_Run] = []
    for length, alike in groupby(lengths):
        runs.append(_Run(runs[-1].stop if runs else 0, len(list(alike)), length))
    return runs
