"""AR-097, AR-100, CF-067: a worker with a rate has costs on its metrics page, and `penstock cost` shows them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from penstock import Client
from penstock.compose.cli import main
from tests.conftest import StartWorker
from tests.flow.conftest import Samples
from tests.packages import write_double
from tests.servers import RedisServer, wait_until

PER_SECOND = 3.6 / 3600
JOBS = 20


def test_jobs_have_a_price(redis_server: RedisServer, models_root, start_worker: StartWorker):
    """The page has seconds times rate, with the labels of the model; the command has the same sums, as JSON and table.

    The model runs as built, so it has a baseline, and no savings are invented. No job ends in the interval: 0 an hour.
    """
    write_double(models_root)
    rate = {"PENSTOCK_INFERENCE_COST_HOURLY_RATES": "cpu=3.6,L4=0.8", "PENSTOCK_INFERENCE_COST_CURRENCY": "EUR"}
    worker = start_worker(redis_server, models_root, environment=rate)
    with Client(redis_server.url) as client:
        jobs = [client.submit("double", {"x": np.full((1, 4), number, np.float32)}) for number in range(JOBS)]
        for job in jobs:
            job.result(180)

    def costs() -> dict[str, Any]:
        found = worker.report()["costs"]
        return found if sum(entry["jobs"] for entry in found["entries"]) == JOBS else {}

    reported = wait_until(costs, 30, "the worker reports all jobs")
    assert (reported["currency"], reported["hourly_rate"], reported["gpu_name"]) == ("EUR", 3.6, "cpu")
    samples = Samples(worker)
    labels = {"model_name": "double", "model_version": "1", "endpoint": "queue"}
    compute_s = samples.total("penstock_compute_seconds_sum", **labels)
    assert compute_s > 0
    assert samples.total("penstock_cost_total", **labels) == pytest.approx(compute_s * PER_SECOND)
    per_1000 = compute_s * PER_SECOND / JOBS * 1000
    assert samples.of("penstock_cost_per_1000_requests", **labels) == {("baseline",): pytest.approx(per_1000)}

    def command(*options: str) -> str:
        shown = CliRunner().invoke(main, ["cost", *options], env={"PENSTOCK_REDIS_URL": redis_server.url})
        assert shown.exit_code == 0, shown.output
        return shown.stdout

    (row,) = json.loads(command("--json", "--requests-per-hour", "36000"))
    assert row == {
        "model": "double",
        "currency": "EUR",
        "jobs": JOBS,
        "compute_s": pytest.approx(compute_s),
        "cost": pytest.approx(compute_s * PER_SECOND),
        "per_1000_requests": {"baseline": pytest.approx(per_1000), "optimized": None},
        "requests_per_hour": 36000,
        "savings": {"per_hour": None, "per_month": None},
    }
    assert command("--requests-per-hour", "36000").splitlines()[1].split()[:3] == ["double", "EUR", str(JOBS)]
    (row,) = json.loads(command("--json", "--interval", "3"))
    assert row["requests_per_hour"] == 0


def test_a_worker_without_a_rate_has_no_costs(redis_server: RedisServer, models_root, start_worker: StartWorker):
    """The default: no price is invented, and the command names the setting."""
    write_double(models_root)
    worker = start_worker(redis_server, models_root)
    with Client(redis_server.url) as client:
        client.submit("double", {"x": np.ones((1, 4), np.float32)}).result(180)
    wait_until(lambda: Samples(worker).total("penstock_jobs_total", outcome="completed"), 30, "the worker counts it")
    assert Samples(worker).of("penstock_cost_total") == Samples(worker).of("penstock_cost_per_1000_requests") == {}
    assert worker.report()["costs"] is None
    environ = {"PENSTOCK_REDIS_URL": redis_server.url}
    assert json.loads(CliRunner().invoke(main, ["cost", "--json", "--interval", "2"], env=environ).stdout) == []
    shown = CliRunner().invoke(main, ["cost", "--requests-per-hour", "1"], env=environ)
    assert "PENSTOCK_INFERENCE_COST_HOURLY_RATE" in shown.stdout
