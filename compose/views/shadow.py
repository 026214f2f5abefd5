"""The data of a shadow, drawn for a person: `penstock shadow status` and `penstock shadow report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.compose.terminal import counted, printable
from penstock.compose.views.canary import verdict_line

__all__ = ["draw_report", "draw_status"]


def draw_status(found: Sequence[Mapping[str, Any]]) -> RenderableType:
    """One row for each shadow."""
    if not found:
        return Text("No shadow runs.")
    table = _table("model", "candidate", "share", "in the queue", "mirrored", "dropped", "shadow worker", "")
    for each in found:
        mirror, asked = each["mirror"], each["worker"]["asked_s_ago"]
        table.add_row(
            each["model"],
            _candidate(each),
            f"{each['share']:.3%}" if each["is_running"] else "stopped",
            f"{each['queue']['pairs']:,}",
            f"{mirror['mirrored']:,}",
            f"{mirror['full'] + mirror['behind']:,}",
            f"asked {asked:g} s ago" if asked is not None else "none yet",
            printable(each["problem"] or each["ended"]),
        )
    return table


def draw_report(found: Mapping[str, Any]) -> RenderableType:
    """Agreement with its interval, a row for each figure, and the worst pairs."""
    parts: list[RenderableType] = [Text(_headline(found)), Text(_outcomes(found["outcomes"]))]
    if found["ended"]:
        parts.append(Text(printable(f"The shadow has ended: {found['ended']}")))
    elif found["canary"] is not None:
        reasons = "; ".join(found["canary"]["reasons"])
        parts.append(Text(printable(f"Canary: {verdict_line(found['canary'])}{': ' if reasons else ''}{reasons}")))
    figures = _table("figure", "pairs", "mean", "95 % interval", "least", "largest", "drift")
    for name, figure in found["figures"].items():
        figures.add_row(
            name,
            f"{figure['count']:,}",
            f"{figure['mean']:.6g}",
            _interval(figure["interval"], ".6g"),
            f"{figure['least']:.6g}",
            f"{figure['largest']:.6g}",
            _drift(figure["drift"]),
        )
    if figures.row_count:
        parts.append(figures)
    if found["worst"]:
        worst = _table("worst pairs", "outcome", "reason or figures", "inputs")
        for each in found["worst"]:
            told = each["reason"] or ", ".join(f"{name} {value:.6g}" for name, value in each["figures"].items())
            inputs = ", ".join(f"{name} {value}" for name, value in each["inputs"].items())
            worst.add_row(each["job_id"], each["outcome"], printable(told), printable(inputs))
        parts.append(worst)
    return Group(*parts)


def _headline(found: Mapping[str, Any]) -> str:
    about = f"{found['model']}: candidate {_candidate(found)}"
    if not found["compared"]:
        return f"{about}, no pair was compared yet"
    interval = _interval(found["agreement_interval"], ".4%")
    return f"{about}, agreement {found['agreement']:.4%} ({interval}) in {counted(found['compared'], 'pair')}"


def _candidate(found: Mapping[str, Any]) -> str:
    form = f" in the form {found['form']}" if found["form"] else ""
    return printable(f"{found['candidate']}{form}")


def _outcomes(outcomes: Mapping[str, int]) -> str:
    return "Outcomes: " + (", ".join(f"{name} {count:,}" for name, count in sorted(outcomes.items())) or "none")


def _interval(bounds: Sequence[float] | None, style: str) -> str:
    return f"{bounds[0]:{style}} to {bounds[1]:{style}}" if bounds else "too few pairs"


def _drift(drift: Mapping[str, Any] | None) -> str:
    if drift is None:
        return "too few pairs"
    if drift["out_at"] is None:
        return "none"
    return f"since pair {drift['out_at']:,}: score {drift['score']:.2f}, limit {drift['limit']:.2f}"


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title)
    return table
