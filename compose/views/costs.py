"""Costs of each model, from the workers' reports: so far, of 1,000 jobs by form, and the projected savings.

worker reports, twice --> jobs per hour of each model and currency --> rows --> JSON or a table
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.compose.views.overview import workers
from penstock.registry.broker.base import FleetEnd
from penstock.workers.observe.cost import HOURS_PER_MONTH, FormCost, per_1000_by_form, projected_savings

__all__ = ["costs", "draw_costs", "jobs_per_hour", "measure"]

Priced: TypeAlias = tuple[str, str]
"""(model, currency)."""


def measure(broker: FleetEnd, interval_s: float, requests_per_hour: float | None) -> list[dict[str, Any]]:
    """The costs, at this rate of each model; None: at the rate of the next interval. Raises BrokerUnavailable."""
    before = workers(broker)
    if requests_per_hour is not None:
        return costs(before, lambda _: requests_per_hour)
    time.sleep(interval_s)
    after = workers(broker)
    return costs(after, jobs_per_hour(before, after).get)


def jobs_per_hour(before: Iterable[Mapping[str, Any]], after: Iterable[Mapping[str, Any]]) -> dict[Priced, float]:
    """The rate of jobs that batches answered, by model and currency, over all workers with a rate.

    A process that is in the second reports only began with no job. One that has not reported again has no rate.
    """
    earlier = {_process(report): report for report in before}
    rates: defaultdict[Priced, float] = defaultdict(float)
    for report in after:
        if not (jobs := _jobs(report)):
            # Also a worker of an older version, which does not say when it reported.
            continue
        old = earlier.get(_process(report))
        since, jobs_before = (report["started"], {}) if old is None else (old["at"], _jobs(old))
        if (span_s := report["at"] - since) > 0:
            for group, count in jobs.items():
                rates[group] += (count - jobs_before.get(group, 0)) / span_s * 3600
    return dict(rates)


def _process(report: Mapping[str, Any]) -> tuple[str, int, float]:
    """A worker in a container has the process id 1 again after a restart."""
    return report["name"], report["pid"], report["started"]


def _jobs(report: Mapping[str, Any]) -> dict[Priced, int]:
    jobs: defaultdict[Priced, int] = defaultdict(int)
    if found := report.get("costs"):
        for entry in found["entries"]:
            jobs[entry["model"], found["currency"]] += entry["jobs"]
    return dict(jobs)


def costs(reports: Iterable[Mapping[str, Any]], rate_of: Callable[[Priced], float | None]) -> list[dict[str, Any]]:
    """A row for each model and currency, ready for JSON; a figure that is not known is None.

    {"model", "currency", "jobs", "compute_s", "cost", "per_1000_requests": {"baseline", "optimized"},
    "requests_per_hour", "savings": {"per_hour", "per_month"}}

    rate_of: requests per hour of a model, to all workers with this currency; None: not known.
    """
    entries: defaultdict[Priced, list[Mapping[str, Any]]] = defaultdict(list)
    for report in reports:
        found = report.get("costs") or {"entries": ()}
        for entry in found["entries"]:
            entries[entry["model"], found["currency"]].append(entry)
    return [_row(*group, entries[group], rate_of(group)) for group in sorted(entries)]


def _row(model: str, currency: str, entries: Sequence[Mapping[str, Any]], rate: float | None) -> dict[str, Any]:
    by_form = per_1000_by_form(FormCost(**entry["in_form"]) for entry in entries)
    savings = None if rate is None else projected_savings(by_form, rate)
    return {
        "model": model,
        "currency": currency,
        **{name: sum(entry[name] for entry in entries) for name in ("jobs", "compute_s", "cost")},
        "per_1000_requests": {"baseline": by_form.get("baseline"), "optimized": by_form.get("optimized")},
        "requests_per_hour": rate,
        "savings": {
            "per_hour": None if savings is None else savings.per_hour,
            "per_month": None if savings is None else savings.per_month,
        },
    }


def draw_costs(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A line for each model, with the meaning of its columns below."""
    if not rows:
        return Text(
            "No worker with jobs has a rate. Expected PENSTOCK_INFERENCE_COST_HOURLY_RATE in the environment of workers"
        )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in (
        "model",
        "",
        "jobs",
        "compute s",
        "cost",
        "baseline",
        "optimized",
        "jobs/h",
        "saves/h",
        "saves/month",
    ):
        table.add_column(column, justify="left" if column in ("model", "") else "right")
    for row in rows:
        per_1000, savings = row["per_1000_requests"], row["savings"]
        table.add_row(
            Text(row["model"]),
            row["currency"],
            f"{row['jobs']:,}",
            f"{row['compute_s']:,.1f}",
            _price(row["cost"]),
            _price(per_1000["baseline"]),
            _price(per_1000["optimized"]),
            "-" if row["requests_per_hour"] is None else f"{row['requests_per_hour']:,.0f}",
            _price(savings["per_hour"]),
            _price(savings["per_month"]),
        )
    legend = (
        "baseline, optimized: cost of 1,000 jobs by the model as built and by the form in use; a month has "
        f"{HOURS_PER_MONTH} hours; -: not known"
    )
    return Group(table, Text(legend, style="dim"))


def _price(amount: float | None) -> str:
    return "-" if amount is None else f"{amount:,.2f}" if abs(amount) >= 100 else f"{amount:.4g}"
