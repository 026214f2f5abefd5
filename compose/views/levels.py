"""The optimization level of a model in each worker, and the wait for a step that an operator requests.

worker reports --> entries, one per worker and loaded version --> JSON or tables
request --> a signed command --> each worker's optimizer --> its entries have the outcome
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.compose.views.overview import workers
from penstock.registry.broker.base import FleetEnd
from penstock.registry.errors import ModelNotReady

__all__ = ["await_answers", "draw_levels", "entries"]

_POLL_S: Final = 0.1


def entries(broker: FleetEnd, model: str, among: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """One entry per worker, or per worker of `among`, and version of the model that it has loaded.

    Raises BrokerUnavailable.
    """
    return [
        {"worker": report["name"], **entry}
        for report in workers(broker)
        if among is None or report["name"] in among
        for entry in report.get("levels", {}).get(model, ())
    ]


def await_answers(
    model: str, read: Callable[[], list[dict[str, Any]]], request: Callable[[], None], timeout_s: float
) -> list[dict[str, Any]]:
    """Make the request, and return the entries once each version that was loaded has one answer more.

    Raises ModelNotReady when no version is loaded, and when the time is over; and as `request` does.
    """
    before = {_key(entry): entry["answers"] for entry in read()}
    if not before:
        raise ModelNotReady(f"No worker has {model!r:.80} loaded. Expected one that serves it, at level 0 or higher")
    request()
    deadline = time.monotonic() + timeout_s
    while True:
        found = [entry for entry in read() if _key(entry) in before]
        late = [entry["worker"] for entry in found if entry["answers"] <= before[_key(entry)]]
        if found and not late:
            return found
        if time.monotonic() > deadline:
            raise ModelNotReady(
                f"No answer within {timeout_s:g} s from {', '.join(late) or 'any worker'}; the step continues"
            )
        time.sleep(_POLL_S)


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    return entry["worker"], entry["content_hash"]


def draw_levels(found: Sequence[Mapping[str, Any]]) -> RenderableType:
    """For each worker and version: level, form and load; then one line per step with its gain or its condition."""
    return Group(*(part for entry in found for part in (_headline(entry), _steps(entry["steps"]), Text())))


def _headline(entry: Mapping[str, Any]) -> Text:
    profile, goldens = entry["profile"], entry["goldens"]
    counts = ", ".join(f"{name} {value:,}" for name, value in entry["counts"].items())
    return Text(
        f"{entry['worker']}, version {entry['version']} ({entry['content_hash'][:12]}): level {entry['level']} of at "
        f"most {entry['max_level']}, serves the form {entry['form']}\n"
        f"profiled: {profile['forwards']:,} forwards, {profile['rows']:,} rows, {profile['rows_per_s']:,.1f} rows/s; "
        f"reference samples: {goldens['jobs'] if goldens else 0}"
        f"{f'; counted: {counts}' if counts else ''}"
    )


def _steps(steps: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("level", "step", "state", "gain", "reason", "evidence"):
        table.add_column(column)
    for step in steps:
        gain = "not measured" if step["gain"] is None else f"{step['gain']:.2f}x"
        evidence = ", ".join(
            f"{name} {_shown(value)}" for name, value in (*step["made"].items(), *step["evidence"].items())
        )
        table.add_row(
            str(step["level"]), step["step"], step["state"], gain, step["reason"] or step["criterion"], evidence
        )
    return table


def _shown(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
