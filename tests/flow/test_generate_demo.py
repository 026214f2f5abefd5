"""`make demo-generate`, as a newcomer sees it: a model is made once, and writes eight texts at once."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.servers import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
_LONGEST_S = 2400
"""Two minutes of a quiet machine; CI runs five other units beside them."""
# The command, but for a training of some seconds.
SMALL = """
import json, os
from penstock.compose.generate_demo.recipe import Recipe
from penstock.compose.generate_demo.show import show_generation
from penstock.compose.terminal import console

recipe = Recipe(
    vocabulary=400, hidden=32, feed_forward=64, layers=2, heads=4, kv_heads=2, positions=640, rows=2, steps=4,
    held_out=0.002,
)
print(json.dumps(show_generation(console(), os.environ, ask=["def own_prompt("], recipe=recipe)))
"""
ROWS = (
    *("tokens/s", "time to first token, p50", "inter-token, p50", "inter-token, p99"),
    *("batch", "prefix-cache hits", "pages used"),
)


def run(home: Path, *arguments: str) -> str:
    """What the program has printed."""
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(home / "tmp"),
        "PENSTOCK_HOME": str(home / "penstock"),
        # Two threads of a training wait for each other where other programs keep the processors busy.
        "OMP_NUM_THREADS": "1",
    }
    (home / "tmp").mkdir(exist_ok=True)
    command = [sys.executable, *arguments]
    ended = subprocess.run(
        command, env=environ, cwd=home, capture_output=True, text=True, timeout=_LONGEST_S, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert list((home / "tmp").iterdir()) == []
    return ended.stdout


def check_facts(facts: dict[str, Any]) -> None:
    """All texts were streamed side by side, and share the pages of their beginning."""
    figures = facts["figures"]
    assert len(facts["texts"]) == figures["texts"] == 8
    assert all(one["text"].startswith(one["prompt"]) for one in facts["texts"])
    assert figures["tokens_per_s"] > 0
    assert 0 < figures["inter_token_p50_ms"] <= figures["inter_token_p99_ms"]
    assert 1 < figures["rows_per_step"] <= 8
    assert 0 < figures["prefix_found"] < figures["prefix_queried"]
    assert 0 < figures["pages_peak"] <= figures["pages"]


def test_model_is_made_once_and_writes_eight_texts(tmp_path: Path):
    """The first run trains and shows the loss; the second one trains nothing. Both stream, and close with the table."""
    first, second = run(tmp_path, "-c", SMALL), run(tmp_path, "-c", SMALL)
    facts, again = (json.loads(shown.splitlines()[-1]) for shown in (first, second))
    assert (facts["model"]["is_new"], again["model"]["is_new"]) == (True, False)
    assert {**facts["model"], "is_new": False} == again["model"]
    assert "Training: step 4 of 4" in first
    assert "Training" not in second
    assert facts["texts"][0]["prompt"] == "def own_prompt("
    for shown, found in ((first, facts), (second, again)):
        check_facts(found)
        assert re.search(r"held-out docstrings: \d\.\d\d nats per token", shown)
        assert re.search(r"^1 \| def own_prompt\(", shown, re.MULTILINE)
        assert {number for number in re.findall(r"^(\d) \| ", shown, re.MULTILINE)} == set("12345678")
        assert all(re.search(rf"^{re.escape(row)}  ", shown, re.MULTILINE) for row in ROWS)
        assert "What this model is good for" in shown
    assert sorted(path.name[:4] for path in (tmp_path / "penstock" / "demo-writer").iterdir())[-1] == "lock"


def test_the_whole_training_makes_docstrings(tmp_path: Path):
    """The command itself: the loss falls far below that of guesses, and most texts have a docstring."""
    facts = json.loads(run(tmp_path, "-m", "penstock", "demo", "--generate", "--json"))
    check_facts(facts)
    assert facts["model"]["loss"] < facts["model"]["loss_before"] - 3
    assert sum('"""' in one["text"] for one in facts["texts"]) >= 6
