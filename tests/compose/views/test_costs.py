"""AR-100: the rows of `penstock cost`, from the reports of workers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from penstock.compose.views.costs import costs, draw_costs, jobs_per_hour


def entry(model: str, jobs: int, cost: float, form: str = "", gain: float | None = 1.0) -> dict[str, Any]:
    """All jobs were served in this form."""
    in_form = {"jobs": jobs, "cost": cost, "form": form, "gain": gain}
    labels = {"model": model, "version": "1", "endpoint": "queue"}
    return {**labels, "jobs": jobs, "compute_s": cost * 1000, "cost": cost, "in_form": in_form}


def report(
    name: str, *entries: dict[str, Any], at: float = 100.0, started: float = 0.0, currency: str = "USD"
) -> dict[str, Any]:
    """The report of a worker in a container."""
    found = {"currency": currency, "hourly_rate": 3.6, "gpu_name": "L4", "entries": list(entries)}
    return {"name": name, "pid": 1, "started": started, "at": at, "costs": found}


def drawn(rows: list[dict[str, Any]]) -> list[str]:
    console = Console(width=200, no_color=True)
    with console.capture() as printed:
        console.print(draw_costs(rows))
    return printed.get().splitlines()


def test_a_row_has_both_forms_and_the_savings():
    """1,000 jobs cost 0.1 in a form 4 times as fast, so 0.4 as built; at 50,000 an hour: 15 an hour, 10,950 a month."""
    (row,) = costs([report("a", entry("mlp", 2000, 0.2, "int8", 4.0))], {("mlp", "USD"): 50_000.0}.get)
    assert json.loads(json.dumps(row)) == row
    assert (row["model"], row["currency"], row["jobs"], row["compute_s"]) == ("mlp", "USD", 2000, pytest.approx(200))
    assert row["cost"] == pytest.approx(0.2)
    assert row["per_1000_requests"] == {"baseline": pytest.approx(0.4), "optimized": pytest.approx(0.1)}
    assert row["savings"] == {"per_hour": pytest.approx(15.0), "per_month": pytest.approx(15.0 * 730)}
    heading, line, legend = drawn([row])
    assert heading.split()[-5:] == ["baseline", "optimized", "jobs/h", "saves/h", "saves/month"]
    assert line.split() == ["mlp", "USD", "2,000", "200.0", "0.2", "0.4", "0.1", "50,000", "15", "10,950.00"]
    assert "a month has 730 hours" in legend


def test_workers_add_up_and_currencies_do_not():
    """A model is one row over all workers, but euros and dollars are not one sum."""
    reports = [
        report("a", entry("mlp", 100, 1.0)),
        report("b", entry("mlp", 300, 3.0, "int8", 2.0), entry("minilm", 1, 1.0)),
        report("c", entry("mlp", 10, 5.0), currency="EUR"),
        {"name": "d", "pid": 4, "costs": None},
        {"name": "of an older version", "pid": 5},
    ]
    rows = costs(reports, {("mlp", "EUR"): 1000.0, ("mlp", "USD"): 2000.0}.get)
    assert [(row["model"], row["currency"], row["jobs"]) for row in rows] == [
        ("minilm", "USD", 1),
        ("mlp", "EUR", 10),
        ("mlp", "USD", 400),
    ]
    assert rows[2]["per_1000_requests"] == {"baseline": pytest.approx(17.5), "optimized": pytest.approx(10.0)}
    assert [row["requests_per_hour"] for row in rows] == [None, 1000.0, 2000.0]


def test_unknown_figures_are_dashes():
    """A model as built saves nothing that is known; an engine has no baseline."""
    reports = [report("a", entry("mlp", 100, 1.0), entry("writer", 100, 1.0, "cuda-graphs", None))]
    rows = costs(reports, {("mlp", "USD"): 1000.0}.get)
    assert all(row["savings"] == {"per_hour": None, "per_month": None} for row in rows)
    _, mlp, writer, _ = drawn(rows)
    assert mlp.split()[5:] == ["10", "-", "1,000", "-", "-"]
    assert writer.split()[5:] == ["-", "10", "-", "-", "-"]


def test_without_a_rate_the_setting_is_named():
    """An empty table would say nothing."""
    assert "PENSTOCK_INFERENCE_COST_HOURLY_RATE" in drawn([])[0]


def test_the_rate_of_jobs_is_that_between_two_reports():
    """Workers add up; a new process began with no job; one without a second report has no rate."""
    before = [report("a", entry("mlp", 100, 1.0)), report("b", entry("mlp", 900, 1.0)), report("c", entry("x", 5, 1.0))]
    after = [
        report("a", entry("mlp", 150, 1.5), entry("minilm", 2, 1.0), at=110.0),
        report("b", entry("mlp", 20, 1.0), at=300.0, started=100.0),
        report("c", entry("x", 5, 1.0)),
    ]
    assert jobs_per_hour(before, after) == {
        ("mlp", "USD"): pytest.approx(5 * 3600 + 0.1 * 3600),
        ("minilm", "USD"): pytest.approx(720),
    }


def test_savings_of_a_currency_are_those_of_its_own_jobs():
    """Jobs that other workers answer save nothing in it."""
    before = [report(name, entry("mlp", 0, 0.0, "int8", 2.0), currency=name) for name in ("EUR", "USD")]
    after = [
        report("EUR", entry("mlp", 10, 0.01, "int8", 2.0), at=110.0, currency="EUR"),
        report("USD", entry("mlp", 30, 0.03, "int8", 2.0), at=110.0, currency="USD"),
    ]
    rows = costs(after, jobs_per_hour(before, after).get)
    assert [row["requests_per_hour"] for row in rows] == [pytest.approx(3600), pytest.approx(3 * 3600)]
    assert [row["savings"]["per_hour"] for row in rows] == [pytest.approx(3.6), pytest.approx(3 * 3.6)]


def test_a_worker_of_an_older_version_has_no_rate_of_jobs():
    """It says neither costs nor when it reported, while a fleet is upgraded."""
    reports = [{"name": "old", "pid": 1, "started": 0.0}]
    assert jobs_per_hour(reports, reports) == {}
