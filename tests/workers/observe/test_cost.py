"""CF-067, AR-097, AR-100: compute seconds at an hourly rate, by form, and what the optimized form saves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.metrics import COST, COST_PER_1000
from penstock.registry.settings import Settings
from penstock.workers.observe.cost import (
    HOURS_PER_MONTH,
    Computed,
    CostEstimator,
    CostForm,
    CostLedger,
    FormCost,
    per_1000_by_form,
    projected_savings,
)

RATES = {"A100_80GB": 3.6, "L4": 0.72}
QUEUE = ("mlp", "1", "queue")


@pytest.fixture
def ledger() -> CostLedger:
    """The costs of a device that costs 3.6 an hour: 0.001 a second."""
    return CostLedger(CostEstimator("A100_80GB", hourly_rates=RATES))


def per_1000(ledger: CostLedger, *sums: Computed) -> dict[tuple[str, ...], float]:
    """The values of penstock_cost_per_1000_requests by endpoint and form."""
    return {labels[2:]: value for labels, value in ledger.values(sums)[COST_PER_1000.name].items()}


def test_cost_is_rate_times_seconds_over_requests():
    """CF-067: 3.6 an hour is 0.001 a second; 50 s of 200 requests cost 0.05, and 1,000 such requests 0.25."""
    estimator = CostEstimator(gpu_name="A100_80GB", hourly_rates=RATES)
    assert estimator.cost(50.0) == pytest.approx(0.05)
    assert estimator.per_1000_requests(50.0, 200) == pytest.approx(0.25)
    assert estimator.per_1000_requests(50.0, 200) == pytest.approx(RATES["A100_80GB"] / 3600 * 50.0 / 200 * 1000)
    assert CostEstimator("L4", hourly_rates=RATES).cost(50.0) == pytest.approx(0.01)


def test_a_device_without_a_rate_is_refused_with_the_known_names():
    """CF-067: no rate is built in, so a name needs one; the error names those that have one."""
    with pytest.raises(ConfigurationError) as refused:
        CostEstimator(gpu_name="H100", hourly_rates=RATES)
    assert str(refused.value) == (
        "There is no hourly rate for the device 'H100'. Expected cost.hourly_rate, or one of the names in "
        "cost.hourly_rates: A100_80GB, L4"
    )
    with pytest.raises(ConfigurationError, match=r"it has none$"):
        CostEstimator(gpu_name="A100_80GB")


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_is_a_price(rate: float):
    """Nothing else can be multiplied with seconds."""
    with pytest.raises(ConfigurationError, match="Expected a number above 0"):
        CostEstimator(hourly_rate=rate)


def test_sums_that_cannot_be_are_refused():
    """No request has no mean, and time does not run backwards."""
    estimator = CostEstimator(hourly_rate=1.0)
    with pytest.raises(InvalidInput, match="Expected 1 or more"):
        estimator.per_1000_requests(1.0, 0)
    with pytest.raises(InvalidInput, match="Expected 0 seconds or more"):
        estimator.cost(-1.0)


def test_savings_are_projected_by_hand():
    """AR-100: 0.5 - 0.2 for 1,000 requests, at 10,000 an hour: 3 an hour, 730 hours a month: 2190."""
    savings = projected_savings({"baseline": 0.5, "optimized": 0.2}, 10_000)
    assert savings is not None
    assert savings.per_hour == pytest.approx(3.0)
    assert savings.per_month == pytest.approx(2190.0)
    assert HOURS_PER_MONTH == 8760 / 12 == 730


def test_a_slower_form_is_a_loss():
    """The difference has a sign."""
    savings = projected_savings({"baseline": 0.2, "optimized": 0.3}, 1_000)
    assert savings is not None
    assert savings.per_month == pytest.approx(-73.0)


@pytest.mark.parametrize("known", [{}, {"baseline": 0.5}, {"optimized": 0.2}])
def test_savings_need_both_figures(known: dict[CostForm, float]):
    """A guess in the place of a measurement would be no saving."""
    assert projected_savings(known, 10_000) is None


def test_parts_of_several_workers_add_up():
    """Two workers, one in a form twice as fast: the same jobs as built, and as they were served."""
    parts = [FormCost(100, 1.0, "", 1.0), FormCost(300, 3.0, "int8", 2.0), FormCost(0, 0.0, "bf16", None)]
    found = per_1000_by_form(parts)
    assert found == {"baseline": pytest.approx((1.0 + 6.0) / 400 * 1000), "optimized": pytest.approx(4.0 / 400 * 1000)}
    assert per_1000_by_form(parts[-1:]) == {}


def test_a_model_as_built_has_a_baseline_only(ledger: CostLedger):
    """AR-097: without an optimized form there is nothing to compare with."""
    assert per_1000(ledger, Computed(QUEUE, 100, 2.0)) == {("queue", "baseline"): pytest.approx(0.02)}
    assert ledger.values([Computed(QUEUE, 100, 2.0)])[COST.name] == {QUEUE: pytest.approx(0.002)}


def test_a_form_has_both_values_by_its_measured_gain(ledger: CostLedger):
    """AR-097: the jobs since the change as served, and times the gain as built; those of before have other batches."""
    ledger.change("mlp", "1", "int8", 4.0, [Computed(QUEUE, 100, 2.0), Computed(("other", "1", "queue"), 7, 7.0)])
    assert per_1000(ledger, Computed(QUEUE, 100, 2.0)) == {}
    after = Computed(QUEUE, 300, 3.0)
    assert per_1000(ledger, after) == {
        ("queue", "optimized"): pytest.approx(1.0 * 0.001 / 200 * 1000),
        ("queue", "baseline"): pytest.approx(4.0 * 0.001 / 200 * 1000),
    }
    assert ledger.values([after])[COST.name] == {QUEUE: pytest.approx(0.003)}, "all seconds cost"


def test_the_same_form_again_changes_nothing(ledger: CostLedger):
    """A decision on another step, such as batching, begins no new count."""
    ledger.change("mlp", "1", "int8", 4.0, [Computed(QUEUE, 100, 2.0)])
    ledger.change("mlp", "1", "int8", 4.0, [Computed(QUEUE, 200, 2.9)])
    assert per_1000(ledger, Computed(QUEUE, 300, 3.0))["queue", "optimized"] == pytest.approx(0.005)


def test_a_form_that_is_switched_off_has_no_value_any_more(ledger: CostLedger):
    """The model runs as built again."""
    ledger.change("mlp", "1", "int8", 4.0, [])
    ledger.change("mlp", "1", "", 1.0, [Computed(QUEUE, 200, 2.0)])
    assert per_1000(ledger, Computed(QUEUE, 300, 4.0)) == {("queue", "baseline"): pytest.approx(0.02)}


def test_an_unmeasured_form_has_no_baseline(ledger: CostLedger):
    """An engine's gains are of parts of a step: nobody measured the whole without them."""
    ledger.change("mlp", "1", "cuda-graphs", None, [])
    assert per_1000(ledger, Computed(QUEUE, 100, 2.0)) == {("queue", "optimized"): pytest.approx(0.02)}


def test_label_sets_beyond_the_bound_cost_but_have_no_form(ledger: CostLedger):
    """They are those of several models."""
    others = Computed(("other", "other", "other"), 10, 5.0)
    values = ledger.values([others])
    assert values[COST.name] == {others.labels: pytest.approx(0.005)}
    assert values[COST_PER_1000.name] == {}
    (entry,) = ledger.as_report([others])["entries"]
    assert per_1000_by_form([FormCost(**entry["in_form"])]) == {}


def test_an_engine_costs_its_steps(ledger: CostLedger):
    """Eight texts at a time, 2 s each: their own seconds overlap. The steps took 3 s, 2 of them before a reload."""
    texts = Computed(("writer", "1", "queue"), 8, 16.0), Computed(("writer", "1", "mixed"), 2, 4.0)
    ledger.engine_ran("writer", "1", "infer", 2.0)
    ledger.engine_ran("writer", "1", "infer", None)
    ledger.engine_ran("writer", "1", "infer", 1.0)
    values = ledger.values(texts)
    assert values[COST.name] == {("writer", "1", ""): pytest.approx(0.003)}
    assert values[COST_PER_1000.name] == {("writer", "1", "", "baseline"): pytest.approx(0.3)}


def test_engines_of_two_endpoints_add_up(ledger: CostLedger):
    """Each reports its own seconds, in turns: the smaller figure is no reload."""
    for seconds in (1.0, 2.0, 3.0):
        ledger.engine_ran("writer", "1", "infer", seconds)
        ledger.engine_ran("writer", "1", "batch", seconds / 10)
    assert ledger.values([])[COST.name] == {("writer", "1", ""): pytest.approx(0.0033)}


def test_waits_for_a_text_server_cost_nothing_here(ledger: CostLedger):
    """Another machine computes, and its rate is not known."""
    ledger.engine_ran("writer", "1", "infer", None)
    assert ledger.values([Computed(("writer", "1", "queue"), 8, 16.0)])[COST.name] == {}


@pytest.mark.parametrize(
    ("overrides", "rate", "name", "currency"),
    [
        ({"hourly_rate": 2.5}, 2.5, "NVIDIA L4", "USD"),
        ({"hourly_rates": ["NVIDIA L4=0.8", "A100_80GB=3.6"]}, 0.8, "NVIDIA L4", "USD"),
        ({"hourly_rates": ["NVIDIA L4=0.8", "A100_80GB=3.6"], "gpu_name": "A100_80GB"}, 3.6, "A100_80GB", "USD"),
        ({"hourly_rate": 2.5, "hourly_rates": ["NVIDIA L4=0.8"], "currency": "EUR"}, 2.5, "NVIDIA L4", "EUR"),
    ],
)
def test_rate_is_that_of_the_settings(tmp_path: Path, overrides: dict[str, Any], rate: float, name: str, currency: str):
    """hourly_rate, else the one of hourly_rates for gpu_name, which is the device's own name where it is unset."""
    settings = Settings.load(environ={}, cwd=tmp_path, overrides={"cost": overrides})
    estimator = CostEstimator.of(settings.inference.cost, "NVIDIA L4")
    assert estimator is not None
    assert (estimator.hourly_rate, estimator.gpu_name, estimator.currency) == (rate, name, currency)


def test_without_a_rate_nothing_is_estimated(tmp_path: Path):
    """The default; a name without a rate is refused, and so is a device that the rates leave out."""
    settings = Settings.load(environ={}, cwd=tmp_path)
    assert CostEstimator.of(settings.inference.cost, "NVIDIA L4") is None
    assert settings.inference.cost.rates_by_name == {}
    for overrides in ({"gpu_name": "A100_80GB"}, {"hourly_rates": ["A100_80GB=3.6"]}):
        changed = settings.changed({"cost": overrides})
        with pytest.raises(ConfigurationError, match="There is no hourly rate for the device"):
            CostEstimator.of(changed.inference.cost, "NVIDIA L4")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({"hourly_rate": 0}, "greater than 0"),
        ({"hourly_rates": ["A100_80GB"]}, "expected NAME=PRICE of one hour, above 0, such as A100_80GB=2.5"),
        ({"hourly_rates": ["A100_80GB=0.0"]}, "expected NAME=PRICE"),
        ({"hourly_rates": ["=2"]}, "expected NAME=PRICE"),
        ({"currency": "Euro"}, "expected a code of ISO 4217, such as USD"),
    ],
)
def test_unusable_prices_are_one_line(tmp_path: Path, overrides: dict[str, Any], expected: str):
    """The message says what is expected."""
    with pytest.raises(ConfigurationError, match=expected):
        Settings.load(environ={}, cwd=tmp_path, overrides={"cost": overrides})
