"""Reports of A/B experiments as tables, at any number of jobs."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO

import numpy as np
import pytest
from rich.console import Console

from penstock.compose.views.experiments import draw_comparison
from penstock.safety.ab_testing import ExperimentPlan, MultiModelComparison
from penstock.safety.routing import Arm, RoutingTable

HALVES = RoutingTable((Arm("1", 0.5), Arm("2", 0.5)), "ab-1")


def drawn(plan: ExperimentPlan, jobs: int) -> str:
    """The report of an experiment whose versions do not differ, after so many jobs."""
    comparison = MultiModelComparison(HALVES, plan)
    rng = np.random.default_rng(4)
    for number in range(jobs):
        comparison.record("12"[number % 2], rng.normal(10.0, 1.0), quality=rng.normal())
    report = {
        "model": "minilm",
        "experiment": "ab-1",
        "status": "running",
        "assignment": "weighted",
        "cached": {"1": 0, "2": 0},
        "plan": asdict(plan),
        **comparison.report(),
    }
    console = Console(file=StringIO(), width=200)
    with console.capture() as shown:
        console.print(draw_comparison(report))
    return shown.get()


@pytest.mark.parametrize("jobs", [0, 1, 2, 4, 199, 200, 2000])
def test_report_is_drawn_at_any_number_of_jobs(jobs: int):
    """Before the first job, before an interval holds, and after."""
    text = drawn(ExperimentPlan(), jobs)
    assert "Verdict by latency_ms: continue" in text
    lines = [line.split() for line in text.splitlines() if line.startswith("2 - 1")]
    # In two tables a row for each metric of which both versions have two samples.
    assert len(lines) == (6 if jobs >= 4 else 0)
    assert ("[" in text) == (jobs >= 200)


def test_report_shows_what_it_can_find():
    """The declared effect, the power for it, the jobs that it needs, and what these jobs can detect."""
    plan = ExperimentPlan(primary="quality", power=0.9, smallest_effects={"quality": 0.2})
    text = drawn(plan, 500)
    heads = ("smallest effect", "power for it", "samples for power 0.9", "detectable with power 0.9")
    assert all(head in text for head in heads)
    (row,) = [line.split()[3:] for line in text.splitlines() if "quality" in line and "%" in line and "2 - 1" in line]
    samples, effect, power, needed, detectable = row[1:]
    assert (samples, effect) == ("500", "0.2")
    # 4 * (1.96 + 1.282)^2 / 0.2^2 at a variance of about 1.
    assert float(needed.replace(",", "")) == pytest.approx(1051, rel=0.15)
    assert 0.4 < float(power.rstrip("%")) / 100 < 0.75
    assert float(detectable) == pytest.approx(0.2 * (float(needed.replace(",", "")) / 500) ** 0.5, rel=0.01)
    assert "has no smallest effect" not in text


def test_report_says_that_no_effect_was_declared():
    """Another metric's effect makes no verdict."""
    text = drawn(ExperimentPlan(smallest_effects={"quality": 0.2}), 500)
    assert "The plan has no smallest effect of latency_ms" in text
    assert "`penstock ab start --smallest-effect latency_ms=VALUE`" in text
