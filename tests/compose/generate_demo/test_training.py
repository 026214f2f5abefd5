"""The training: a model that has learnt, of which the engine is served, and the same one each time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.compose.generate_demo.recipe import Recipe, Result
from penstock.compose.generate_demo.training import learning_rate, train
from penstock.workers.generation.engine import Engine

RECIPE = Recipe(
    vocabulary=300,
    hidden=32,
    feed_forward=64,
    layers=2,
    heads=4,
    kv_heads=2,
    positions=32,
    rows=4,
    steps=60,
    learning_rate=1e-2,
    held_out=0.1,
)
TEXTS = [f'def add_{number}(a, b):\n    """Add a to b, {number} times."""\n' for number in range(60)]


def trained(folder: Path, steps: list[tuple[int, float]]) -> Result:
    return train(RECIPE, TEXTS, folder, 1, lambda step, loss: steps.append((step, loss)))


def test_a_model_learns_and_is_served(tmp_path: Path):
    """The loss of texts that it has not seen falls; the engine loads the folder, and the text has their form."""
    steps: list[tuple[int, float]] = []
    result = trained(tmp_path, steps)
    assert [step for step, _ in steps] == list(range(1, RECIPE.steps + 1))
    assert result.loss < result.loss_before / 2
    assert (result.docstrings, result.held_out, result.threads) == (60, 6, 1)
    assert result.tokens_seen == RECIPE.steps * RECIPE.rows * RECIPE.positions
    engine = Engine.from_pretrained(tmp_path, kv_cache_mb=1, packed_linears="off")
    assert sum(each.numel() for each in engine.decoder.model.parameters()) == result.parameters
    (found,) = engine.generate("def add_5(a", {"max_tokens": 20, "temperature": 0})
    assert "Add a to b" in found.outputs[0].text


def test_the_same_recipe_makes_the_same_model(tmp_path: Path):
    """Step by step. The caller's number of threads is as before."""
    before = torch.get_num_threads()
    runs: list[list[tuple[int, float]]] = [[], []]
    results = [trained(tmp_path / str(number), steps) for number, steps in enumerate(runs)]
    assert runs[0] == runs[1]
    assert results[0].loss == results[1].loss
    assert torch.get_num_threads() == before


def test_threads_come_back_after_an_error(tmp_path: Path):
    """A training that is cut changes nothing in its process."""
    before = torch.get_num_threads()

    def cut(_step: int, _loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(RECIPE, TEXTS, tmp_path, before + 1, cut)
    assert torch.get_num_threads() == before
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("steps", [1, 2, 20, 1000])
def test_the_learning_rate_rises_then_falls(steps: int):
    """It is above 0 at each step, reaches the peak, and never exceeds it."""
    recipe = Recipe(steps=steps, learning_rate=1.0)
    rates = [learning_rate(step, recipe) for step in range(steps)]
    peak = rates.index(max(rates))
    assert rates[peak] == pytest.approx(1.0)
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert min(rates) > 0
