"""Packed linear layers of a decoder: when they are used, that they write the same, and that they can be off."""

from __future__ import annotations

import pytest

from penstock.workers.generation.packing import least_rows, pack
from penstock.workers.runtime.prepacked import PrepackedLinear, can_prepack
from tests.servers import leave_out
from tests.workers.generation.architectures import decoder, reference
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of, token_ids


@pytest.mark.parametrize(
    ("dense", "packed", "expected"),
    [
        ([2, 2, 2, 2], [1, 1, 1, 1], 1),
        ([1, 2, 2, 2], [1, 1, 1, 1], 4),
        ([2, 1, 2, 2], [1, 1, 1, 1], 16),
        ([1, 1, 1, 2], [1, 1, 1, 1], 64),
        ([2, 2, 2, 1], [1, 1, 1, 1], None),
        ([1.02] * 4, [1, 1, 1, 1], None),
    ],
)
def test_packed_weights_are_used_where_all_larger_calls_gain(dense, packed, expected):
    """From the least number of rows on, from which every tried number was faster by 3 percent."""
    assert least_rows(dense, packed) == expected


def _packed_layers(model):
    return [layer for layer in model.modules() if isinstance(layer, PrepackedLinear)]


def test_packed_layers_write_the_same():
    """Greedy tokens are those of `model.generate` with all layers packed, also for single rows."""
    model = decoder("Llama")
    if not can_prepack(model):
        leave_out("this build of torch has no operators for packed weights")
    prompts = prompts_of(3, 17, 40)
    expected = [reference(model, prompt, 16) for prompt in prompts]
    engine = open_engine(model, packed_linears="on", kv_cache_mb=4)
    assert engine.packing.packed == engine.packing.layers == len(_packed_layers(model)) == 3 * 7 + 1
    assert {layer.least_rows for layer in _packed_layers(model)} == {1}
    assert token_ids(engine.generate(prompts, GREEDY)) == expected


def test_the_trial_leaves_each_layer_packed_or_as_it_was():
    """Whichever is faster here; off changes nothing."""
    model = decoder("Llama")
    kept = pack(model, "auto")
    assert kept.packed == len(_packed_layers(model))
    assert all(layer.least_rows in (1, 4, 16, 64) for layer in _packed_layers(model))
    plain = decoder("Llama")
    assert pack(plain, "off") == (0, 0, 0)
    assert _packed_layers(plain) == []
