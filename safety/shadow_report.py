"""What a shadow has shown: fields of the report in the broker -> shares and means with intervals, and drift. Pure.

n:<outcome>  count                                    --> share of agreement, with Wilson's interval
f:<figure>   count, mean, sum of squares, least, most --> mean with its interval
series       figures in order                         --> drift: EWMA of normal scores beside its control limit
drift        state of the monitors                    --> the side on which each figure gets worse
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import isfinite, sqrt
from typing import Any, Final, NamedTuple

from penstock.safety.drift import DriftLimits, DriftMonitor
from penstock.safety.statistics import Moments, mean_interval, proportion_interval
from penstock.safety.validators import WorseSide

__all__ = ["COMPARED", "FAILURES", "drift_of", "report_of"]

COMPARED: Final = ("pass", "fail")
FAILURES: Final = ("error", "timeout", "crashed")
"""Outcomes of a candidate that gave no outputs. They count as disagreement."""
_DECIMALS: Final = 9


class _Figure(NamedTuple):
    """A field of the report."""

    moments: Moments
    least: float
    largest: float


def drift_of(
    figure: str, values: Sequence[float], limits: DriftLimits | None = None, *, worse: WorseSide = "either"
) -> dict[str, Any] | None:
    """The smoothed score of a figure beside its control limit; None for too few values. See drift.py.

    The first values are the reference window. `out_at` is the index of the value at which the score left the limit;
    None: it never did. `reason`: the alert in words.
    """
    monitor, out_at = DriftMonitor(figure, worse, limits or DriftLimits()), None
    for index, value in enumerate(values):
        # Rounding is no drift: equal outputs differ in the last bits only, and ranks would see that.
        if monitor.observe(round(value, _DECIMALS)) is not None:
            out_at = index
    if not monitor.count:
        return None
    reason = monitor.alert.reason if monitor.alert is not None else ""
    return {"score": monitor.score, "limit": monitor.limit, "out_at": out_at, "reason": reason}


def report_of(
    fields: Mapping[str, str], series: Sequence[str] = (), limits: DriftLimits | None = None
) -> dict[str, Any]:
    """The report as plain data. fields: those of the broker; series: JSON, oldest first. Bad fields are left out."""
    outcomes = {
        name.removeprefix("n:"): int(value)
        for name, value in fields.items()
        if name.startswith("n:") and value.isdecimal()
    }
    compared = sum(outcomes.get(name, 0) for name in (*COMPARED, *FAILURES))
    agreed = outcomes.get("pass", 0)
    by_figure, sides = _by_figure(series), _worse_sides(fields.get("drift", ""))
    figures: dict[str, Any] = {}
    for name, value in sorted(fields.items()):
        if not name.startswith("f:") or (found := _figure(value)) is None:
            continue
        figure, moments = name.removeprefix("f:"), found.moments
        figures[figure] = {
            "count": moments.count,
            "mean": moments.mean,
            "interval": mean_interval(moments) if moments.count > 1 else None,
            "deviation": sqrt(moments.variance) if moments.count > 1 else 0.0,
            "least": found.least,
            "largest": found.largest,
            "drift": drift_of(figure, by_figure.get(figure, ()), limits, worse=sides.get(figure, "either")),
        }
    return {
        "compared": compared,
        "outcomes": outcomes,
        "agreement": agreed / compared if compared else None,
        "agreement_interval": proportion_interval(agreed, compared) if compared else None,
        "figures": figures,
    }


def _figure(text: str) -> _Figure | None:
    try:
        count, mean, m2, least, largest = map(float, text.split())
    except ValueError:
        return None
    return _Figure(Moments(int(count), mean, max(0.0, m2)), least, largest) if count >= 1 else None


def _worse_sides(text: str) -> dict[str, WorseSide]:
    """By figure, from the state that workers/shadow/drift.py stores."""
    with suppress(LookupError, RecursionError, TypeError, ValueError):
        found = {str(each["metric"]): each["worse"] for each in json.loads(text)["monitors"]}
        return {figure: side for figure, side in found.items() if side in ("lower", "higher")}
    return {}


def _by_figure(series: Sequence[str]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for line in series:
        try:
            point = json.loads(line)
        except ValueError:
            continue
        if isinstance(point, dict):
            for name, value in point.items():
                if isinstance(value, float | int) and not isinstance(value, bool) and isfinite(value):
                    found.setdefault(name, []).append(float(value))
    return found
