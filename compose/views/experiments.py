"""Reports of rollouts and A/B experiments as tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    table = _table("", "version", "jobs", "errors", "cached", "mean ms", "p95 ms")
    for name in ("stable", "candidate"):
        seconds = [evidence[f"{name}_mean_s"], evidence[f"{name}_p95_s"]]
        counts = [str(evidence[f"{name}_{what}"]) for what in ("jobs", "errors", "cached")]
        table.add_row(name, report[name], *counts, *(_ms(each) for each in seconds))
    gate = report["gate"]
    facts = f"gate: {gate['verdict']}: {gate['reason']}. Failures so far: {report['failures']}"
    return Group(Text(rollout_line(report)), Text(facts), Text(), table)


def draw_comparison(report: Mapping[str, Any]) -> RenderableType:
    """The arms, each pair with the interval that holds at every look, and what Welch's test can find."""
    head = (
        f"{report['model']}: the A/B experiment {report['experiment']} is {report['status']}, {report['assignment']}. "
        f"Verdict by {report['primary']}: {report['verdict']}"
    )
    parts: list[RenderableType] = [
        Text(head),
        Text(),
        _arms(report),
        Text(),
        _pairs(report),
        Text(),
        _powers(report),
        Text(),
    ]
    return Group(*parts, *(Text(note) for note in _notes(report)))


def _arms(report: Mapping[str, Any]) -> Table:
    table = _table("version", "weight", "jobs", "errors", "cached", "mean ms", "error rate", "quality", "rated")
    for arm in report["arms"]:
        rate = arm["error_rate"]["mean"]
        table.add_row(
            arm["version"],
            f"{arm['weight']:g}",
            str(arm["requests"]),
            str(arm["errors"]),
            str(report["cached"][arm["version"]]),
            _number(arm["latency_ms"]["mean"]),
            "" if rate is None else f"{rate:.2%}",
            _number(arm["quality"]["mean"]),
            str(arm["quality"]["samples"]),
        )
    return table


def _pairs(report: Mapping[str, Any]) -> Table:
    table = _table("pair", "metric", "difference, at any look", "verdict", "Welch's p, for one look")
    for pair, metric, found in _compared(report):
        once, any_time = found["once"], found["any_time"]
        # Too few samples, or none that differ: there is no interval yet.
        interval = "" if any_time["low"] is None else f" [{any_time['low']:.3g}, {any_time['high']:.3g}]"
        p_value = "" if once["p_value"] is None else f"{once['p_value']:.2g}"
        table.add_row(pair, metric, f"{once['difference']:.3g}{interval}", any_time["verdict"], p_value)
    return table


def _powers(report: Mapping[str, Any]) -> Table:
    """Samples are those of both arms together, at their present shares."""
    power = f"{report['plan']['power']:g}"
    wanted = ("smallest effect", "power for it", f"samples for power {power}", f"detectable with power {power}")
    table = _table("pair", "metric", "samples", *wanted)
    for pair, metric, found in _compared(report):
        once = found["once"]
        reached, needed = once["power_for_smallest_effect"], once["samples_for_smallest_effect"]
        table.add_row(
            pair,
            metric,
            f"{sum(found['samples']):,}",
            _number(once["smallest_effect"]),
            "" if reached is None else f"{reached:.1%}",
            "" if needed is None else f"{needed:,}",
            _number(once["detectable_difference"]),
        )
    return table


def _compared(report: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The name of each pair, with each metric of which both versions have samples."""
    for pair in report["comparisons"]:
        for metric, found in pair["metrics"].items():
            if found["once"] is not None:
                yield f"{pair['b']} - {pair['a']}", metric, found


def _notes(report: Mapping[str, Any]) -> Iterator[str]:
    split, primary = report["split"], report["primary"]
    if split["is_as_planned"] is False:
        yield f"The shares are not the planned ones (p {split['p_value']:.2g})"
    if primary not in report["plan"]["smallest_effects"]:
        yield (
            f"The plan has no smallest effect of {primary}: versions are never found equivalent, and the jobs that are "
            f"needed are unknown. Expected `penstock ab start --smallest-effect {primary}=VALUE`"
        )
    yield from report["caveats"]


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column)
    return table


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.3g}"
