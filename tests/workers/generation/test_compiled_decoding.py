"""The compiled form of a decoder: the same logits, or none. The graphs that have it need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from penstock.workers.generation.attention import KeyValuePools
from penstock.workers.generation.compiled_decoding import CompiledDecoding
from penstock.workers.generation.logit_evidence import logit_evidence
from penstock.workers.generation.model import Decoder, wrap_decoder
from penstock.workers.generation.scheduler import Chunk, Sequence
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import prompts_of
from tests.workers.generation.gates import open_gate

PAGE_SIZE = 4


def decoding(rows: int) -> tuple[Decoder, Any, KeyValuePools]:
    """A decoder, the batch of a decoding step of so many rows, and the pages with what came before."""
    loaded = wrap_decoder(decoder("Llama"), None, 64)
    pools = KeyValuePools(100, PAGE_SIZE)
    steps = []
    for row, prompt in enumerate(prompts_of(9, 30, 14, 2)[:rows]):
        one = Sequence(str(row), prompt, len(prompt), pages=[*range(1 + 12 * row, 13 + 12 * row)])
        loaded.forward(loaded.batch([Chunk(one, 0, len(prompt) - 1)], PAGE_SIZE), pools)
        steps.append(Chunk(one, len(prompt) - 1, 1))
    return loaded, loaded.batch(steps, PAGE_SIZE), pools


@pytest.mark.slow
def test_compiled_logits_are_those_of_the_model():
    """Torch's compiler, for a CPU here, around the attention as it is."""
    loaded, batch, pools = decoding(4)
    expected, calls = loaded.forward(batch, pools)
    gate, decisions = open_gate()
    compiled = CompiledDecoding(loaded, pools, gate)
    assert compiled.evidence(batch).reasons == ()
    model = compiled.model_for(batch)
    assert model is not None
    found, same_calls = loaded.forward(batch, pools, model)
    assert same_calls == calls
    assert torch.allclose(found, expected, atol=1e-5)
    assert model is not loaded.model
    assert decisions == []


@pytest.mark.parametrize(
    ("compiled", "reason"),
    [("raises", "RuntimeError: no compiler"), ("other logits", "a row of logits differs by")],
)
def test_a_form_that_is_not_as_good_is_none(compiled, reason, monkeypatch, caplog):
    """The model itself goes on, without a further comparison; the record and the log say why."""

    def compile_(model: Any) -> Any:
        def forward(**inputs: Any) -> Any:
            if compiled == "raises":
                raise RuntimeError("no compiler")
            output = model(**inputs)
            output.logits = output.logits.flip(-1)
            return output

        return forward

    monkeypatch.setattr(torch, "compile", compile_)
    loaded, batch, pools = decoding(2)
    gate, decisions = open_gate()
    form = CompiledDecoding(loaded, pools, gate)
    assert [form.model_for(batch), form.model_for(batch)] == [None, None]
    assert decisions.actions == [("compiled-decoding", "disabled")]
    assert reason in decisions[0].reason
    assert [vars(record)["reason"] for record in caplog.records] == [decisions[0].reason]


@pytest.mark.parametrize(
    ("dtype", "change", "expected"),
    [
        (torch.float32, 1e-4, True),
        (torch.float32, 1e-2, False),
        (torch.bfloat16, 1e-2, True),
        (torch.bfloat16, 0.1, False),
        (torch.bfloat16, float("nan"), False),
    ],
)
def test_each_row_is_judged(dtype, change, expected):
    """By the length of the difference, as a share of the length of the row."""
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    other = logits.clone()
    other[1] *= 1 + change
    evidence = logit_evidence(other, logits, dtype)
    assert (evidence.reasons == ()) is expected
    assert evidence.figures["token_agreement"] == (1 if change == change else pytest.approx(2 / 3))
    assert evidence.figures["logits_difference"] == pytest.approx(change, rel=0.01, nan_ok=True)
