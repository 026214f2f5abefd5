"""Reports of rollouts and A/B experiments as tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["draw_comparison", "draw_rollout", "rollout_line"]


def rollout_line(report: Mapping[str, Any]) -> str:
    """Where a rollout stands, in one line."""
    steps = ", ".join(f"{step:g}" for step in report["steps"])
    line = (
        f"{report['model']}: {report['stable']} -> {report['candidate']} is {report['status']} at "
        f"{report['percent']:g} % (step {report['step']} of {steps})"
    )
    left_s = report["dwell_left_s"]
    return f"{line}, {left_s:.0f} s of the dwell left" if left_s else line


def draw_rollout(report: Mapping[str, Any]) -> RenderableType:
    """The step, the gate, and the figures of both versions in the step."""
    evidence = report["gate"]["evidence"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "version", "jobs", "errors", "cached", "mean ms", "p95 ms"):
        table.add_column(column)
    for name in ("stable", "candidate"):
        seconds = [evidence[f"{name}_mean_s"], evidence[f"{name}_p95_s"]]
        counts = [str(evidence[f"{name}_{what}"]) for what in ("jobs", "errors", "cached")]
        table.add_row(name, report[name], *counts, *(_ms(each) for each in seconds))
    gate = report["gate"]
    facts = f"gate: {gate['verdict']}: {gate['reason']}. Failures so far: {report['failures']}"
    return Group(Text(rollout_line(report)), Text(facts), Text(), table)


def draw_comparison(report: Mapping[str, Any]) -> RenderableType:
    """The arms, and each pair by the primary metric with the interval that holds at every look."""
    arms = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("version", "weight", "jobs", "errors", "cached", "mean ms", "error rate", "quality", "rated"):
        arms.add_column(column)
    for arm in report["arms"]:
        mean = arm["latency_ms"]["mean"]
        rate = arm["error_rate"]["mean"]
        arms.add_row(
            arm["version"],
            f"{arm['weight']:g}",
            str(arm["requests"]),
            str(arm["errors"]),
            str(report["cached"][arm["version"]]),
            "" if mean is None else f"{mean:.3g}",
            "" if rate is None else f"{rate:.2%}",
            "" if arm["quality"]["mean"] is None else f"{arm['quality']['mean']:.3g}",
            str(arm["quality"]["samples"]),
        )
    pairs = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("pair", "metric", "difference, at any look", "verdict", "Welch's p, for one look"):
        pairs.add_column(column)
    for pair in report["comparisons"]:
        for metric, found in pair["metrics"].items():
            if found["once"] is not None:
                _add_pair(pairs, pair, metric, found)
    head = (
        f"{report['model']}: the A/B experiment {report['experiment']} is {report['status']}, {report['assignment']}. "
        f"Verdict by {report['primary']}: {report['verdict']}"
    )
    split = report["split"]
    shares = (
        ""
        if split["is_as_planned"] in (True, None)
        else f"The shares are not the planned ones (p {split['p_value']:.2g})"
    )
    notes = [Text(each) for each in (shares, *report["caveats"]) if each]
    return Group(Text(head), Text(), arms, Text(), pairs, Text(), *notes)


def _add_pair(table: Table, pair: Mapping[str, Any], metric: str, found: Mapping[str, Any]) -> None:
    once, any_time = found["once"], found["any_time"]
    p_value = once["p_value"]
    table.add_row(
        f"{pair['b']} - {pair['a']}",
        metric,
        f"{once['difference']:.3g} [{any_time['low']:.3g}, {any_time['high']:.3g}]",
        any_time["verdict"],
        "" if p_value is None else f"{p_value:.2g}",
    )


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g}"
