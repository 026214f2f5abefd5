"""The data of a canary, drawn for a person: `penstock canary run`, and a part of `penstock shadow report`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.compose.terminal import counted, printable

__all__ = ["draw_canary", "verdict_line"]


def draw_canary(found: Mapping[str, Any]) -> RenderableType:
    """The verdict with its reasons, a row for each figure, and the worst pairs."""
    form = f" in the form {printable(found['form'])}" if found["form"] else ""
    about = f"{found['model']}: candidate {printable(found['candidate'])}{form} beside {printable(found['active'])}"
    parts: list[RenderableType] = [Text(f"{about}: {verdict_line(found)}", style="bold")]
    parts += [Text(f"  {printable(reason)}") for reason in found["reasons"]]
    parts.append(
        Text(f"{counted(found['goldens'], 'golden')}, {counted(found['shadow_pairs'], 'pair')}, {_latency(found)}")
    )
    if (pause_s := found["breaker_pause_s"]) is not None:
        parts.append(Text(f"  its circuit breaker stays open for {pause_s:.0f} s; run the canary again then"))
    elif found["breaker_stays_open"]:
        parts.append(Text("  its circuit breaker stays open: it may have opened after the first of these pairs"))
    figures = Table(box=None, pad_edge=False)
    for title in ("figure", "value", "limit", "95 % interval", "verdict"):
        figures.add_column(title)
    for name, figure in found["figures"].items():
        figures.add_row(name, _number(figure["value"]), _number(figure["limit"]), _interval(figure), figure["verdict"])
    if figures.row_count:
        parts.append(figures)
    for each in found["examples"]:
        inputs = ", ".join(f"{name} {value}" for name, value in each["inputs"].items())
        told = each["reason"] or ", ".join(f"{name} {value:.6g}" for name, value in each["figures"].items())
        parts.append(Text(printable(f"{each['job_id']}  {told}  {inputs}"), overflow="ellipsis", no_wrap=True))
    return Group(*parts)


def verdict_line(found: Mapping[str, Any]) -> str:
    """`FAIL after 50 pairs`."""
    return f"{found['verdict']} after {counted(found['pairs'], 'pair')}"


def _latency(found: Mapping[str, Any]) -> str:
    ratio = found["latency_ratio"]
    return "latency not measured" if ratio is None else f"{ratio:.2f} times the served forward time of a row"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _interval(figure: Mapping[str, Any]) -> str:
    bounds = figure["interval"]
    return f"{bounds[0]:.6g} to {bounds[1]:.6g}" if bounds else ""
