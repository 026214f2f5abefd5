"""An encoder that computes no padding gives the vectors of the model that does, or is not made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.registry.tensors import Array
from penstock.workers.runtime import prepacked, unpadded
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.compilable import CompilationRefused
from penstock.workers.runtime.forms import Forward, WithProvenance
from penstock.workers.runtime.transformers import EncoderRuntime
from penstock.workers.runtime.unpadded import UnpaddedEncoder
from tests.servers import leave_out

WORDS: Final = (40, 3, 120, 41, 3, 1, 180, 40, 77, 3)
"""Some rows have equal lengths, others do not; all in one batch, in no order."""


pytestmark = pytest.mark.usefixtures("packing_operators")


@pytest.fixture
def pooled(minilm: EncoderRuntime) -> Any:
    """A copy of the module that a test may change."""
    return copy.deepcopy(minilm._loaded)


def batch_of(runtime: EncoderRuntime, words: Sequence[int] = WORDS) -> Prepared:
    return runtime.prepare([{"text": np.array(["word " * count for count in words], object)}])


def embedded(form: Forward, batch: Prepared) -> Array:
    return form(batch)["embedding"]


def unpadded_form(runtime: EncoderRuntime, dtype: torch.dtype = torch.float32) -> WithProvenance:
    try:
        form = runtime._unpadded(dtype)
    except CompilationRefused:
        if dtype == torch.bfloat16:
            leave_out("this build of torch packs no bf16")
        raise
    assert isinstance(form, WithProvenance)
    return form


def count_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each use of the operator from now on."""
    counted: list[int] = []
    multiply = prepacked._multiply

    def noted(rows: torch.Tensor, *others: Any, has_gelu: bool) -> torch.Tensor:
        counted.append(rows.numel() // rows.shape[-1])
        return multiply(rows, *others, has_gelu=has_gelu)

    monkeypatch.setattr(prepacked, "_multiply", noted)
    return counted


# Vectors


@pytest.mark.parametrize("words", [WORDS, (5,), (1, 2), (30,) * 9, tuple(range(1, 20))], ids=str)
def test_vectors_are_those_of_the_padded_model_in_the_order_of_the_texts(
    minilm: EncoderRuntime, words: tuple[int, ...]
):
    """Level 2 promises the numbers of the eager model to 1e-5, for any lengths in any order."""
    batch = batch_of(minilm, words)
    ours = embedded(unpadded_form(minilm), batch)
    np.testing.assert_allclose(ours, embedded(minilm.forms.reference, batch), rtol=0, atol=1e-5)


def test_bf16_points_where_fp32_does(minilm: EncoderRuntime):
    """Level 3 promises a cosine of 0.999, and the arithmetic is another one."""
    batch = batch_of(minilm)
    ours, exact = embedded(unpadded_form(minilm, torch.bfloat16), batch), embedded(minilm.forms.reference, batch)
    assert 0.999 <= (ours * exact).sum(axis=1).min() < 1 - 1e-7


def test_no_padding_is_computed(minilm: EncoderRuntime, monkeypatch: pytest.MonkeyPatch):
    """Each product has the tokens of the texts as rows, all at once: four products in each of six layers."""
    form, batch = unpadded_form(minilm), batch_of(minilm)
    assert any(piece.mask is not None for piece in batch.payload)
    rows = count_rows(monkeypatch)
    embedded(form, batch)
    assert rows == [sum(count + 2 for count in WORDS)] * 24


def test_a_vector_does_not_depend_on_its_neighbours(minilm: EncoderRuntime):
    """Attention stays within a row, also among rows of one length that are computed together."""
    form = unpadded_form(minilm)
    texts = ["the same length", "but other words", "and other sense"]
    alone, together = (
        np.concatenate([embedded(form, minilm.prepare([{"text": np.array(part, object)}])) for part in parts])
        for parts in ([[text] for text in texts], [texts])
    )
    np.testing.assert_allclose(alone, together, rtol=0, atol=1e-5)
    assert np.abs(together[0] - together[1]).max() > 1e-2


@pytest.mark.parametrize(("limit", "dtype"), [("_MOST_TOKENS", torch.float32), ("_MOST_SCORES", torch.bfloat16)])
def test_large_batches_are_computed_in_parts(
    minilm: EncoderRuntime, monkeypatch: pytest.MonkeyPatch, limit: str, dtype: torch.dtype
):
    """Parts bound the memory, and change no more than a rounding."""
    form, batch = unpadded_form(minilm, dtype), batch_of(minilm)
    calls: list[int] = []
    count_calls(monkeypatch, calls)
    whole = embedded(form, batch)
    of_whole = len(calls)
    calls.clear()
    monkeypatch.setattr(unpadded, limit, 64)
    assert (embedded(form, batch) * whole).sum(axis=1).min() > 0.9999
    assert len(calls) > of_whole


def count_calls(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    """Notes the tokens of each block and of each pass through the layers."""
    for name in ("_embed", "_block"):
        method: Callable[..., torch.Tensor] = getattr(UnpaddedEncoder, name)

        def noted(
            self: UnpaddedEncoder, values: torch.Tensor, rest: Any, call: Callable[..., torch.Tensor] = method
        ) -> torch.Tensor:
            calls.append(len(values))
            return call(self, values, rest)

        monkeypatch.setattr(UnpaddedEncoder, name, noted)


@given(st.lists(st.integers(1, 512), min_size=1, max_size=80))
def test_parts_and_runs_hold_every_token_once(lengths: list[int]):
    """Parts keep the order and the limit; the runs of a part are its rows, one after another."""
    parts = list(unpadded._parts(lengths))
    assert [length for part in parts for length in part] == lengths
    assert all(len(part) == 1 or sum(part) <= unpadded._MOST_TOKENS for part in parts)
    for part in parts:
        runs = unpadded._runs(part)
        assert [run.length for run in runs for _ in range(run.rows)] == list(part)
        assert [run.start for run in runs] == [0, *(run.stop for run in runs[:-1])]
        assert runs[-1].stop == sum(part)


# Forms


def test_minilm_is_tried_without_padding(minilm: EncoderRuntime):
    """Both forms that pack weights take it, and say how much memory it takes beside the model."""
    forms = minilm.candidates(None)
    exact = forms["prepacked"]()
    assert isinstance(exact, WithProvenance)
    # 42.5 MB of packed weights, and the joined ones of query, key and value with the positions.
    assert exact.made == {
        "packed_layers": 24,
        "fused_activations": 6,
        "memory_growth_mb": pytest.approx(53.9, abs=0.1),
    }
    if "bf16" in forms:
        reduced = forms["bf16"]()
        assert isinstance(reduced, WithProvenance)
        assert reduced.made.get("packed_layers") == 24


def test_the_serving_model_stays_as_it_is(minilm: EncoderRuntime):
    """The form shares weights with the model, and changes neither them nor its classes."""
    before = {name: type(one) for name, one in minilm._loaded.named_modules()}
    numbers = {name: weight.clone() for name, weight in minilm._loaded.named_parameters()}
    embedded(unpadded_form(minilm), batch_of(minilm))
    assert {name: type(one) for name, one in minilm._loaded.named_modules()} == before
    assert all(torch.equal(weight, numbers[name]) for name, weight in minilm._loaded.named_parameters())


# Refusals


def example() -> tuple[torch.Tensor, torch.Tensor]:
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[0, 3:] = 0
    return torch.arange(12).reshape(2, 6), mask


def with_tanh_gelu(pooled: Any) -> None:
    pooled.encoder.encoder.layer[2].intermediate.intermediate_act_fn = nn.GELU(approximate="tanh").eval()


def with_hook(pooled: Any) -> None:
    pooled.encoder.encoder.layer[1].register_forward_hook(lambda *_: None)


def in_training(pooled: Any) -> None:
    pooled.encoder.encoder.layer[0].train()


def as_decoder(pooled: Any) -> None:
    pooled.encoder.config.is_decoder = True


def of_another_class(pooled: Any) -> None:
    pooled.encoder.__class__ = type("OtherModel", (type(pooled.encoder),), {})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (with_tanh_gelu, "another activation"),
        (with_hook, "hooks"),
        (in_training, "in training"),
        (as_decoder, "a decoder"),
        (of_another_class, "found OtherModel"),
    ],
)
def test_other_encoders_are_refused(pooled: Any, change: Callable[[Any], None], reason: str):
    """What is computed here is one architecture; each part that could differ is looked at."""
    UnpaddedEncoder(pooled, torch.float32, example())
    change(pooled)
    with pytest.raises(CompilationRefused, match=reason):
        UnpaddedEncoder(pooled, torch.float32, example())


def test_model_that_computes_something_else_is_refused(pooled: Any, monkeypatch: pytest.MonkeyPatch):
    """Another version of transformers may give the same class another meaning: its vectors show it."""
    monkeypatch.setattr(unpadded, "scaled_dot_product_attention", lambda query, key, value, scale: value)
    with pytest.raises(CompilationRefused, match="other vectors than the model's"):
        UnpaddedEncoder(pooled, torch.float32, example())


def test_weights_beyond_the_limit_are_refused(pooled: Any, monkeypatch: pytest.MonkeyPatch):
    """The limit of packed layers holds, and nothing is packed above it."""
    monkeypatch.setattr(unpadded, "MOST_PACKED_BYTES", 42_000_000)
    monkeypatch.setattr(unpadded, "pack_linears", lambda _: pytest.fail("a weight was packed"))
    with pytest.raises(CompilationRefused, match="would take 42 MB, expected at most 42"):
        UnpaddedEncoder(pooled, torch.float32, example())
