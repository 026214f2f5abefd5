"""A/B comparisons and the server in the process: what is recorded, and what may be said of it (AR-006, AR-045, AR-085,
AR-091, CX-039, CX-040)."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy import stats

from penstock.registry.errors import InvalidInput
from penstock.safety.ab_testing import (
    ABModelComparison,
    ABTestingServer,
    ArmStatistics,
    ExperimentPlan,
    MultiModelComparison,
)
from penstock.safety.routing import Arm, RoutingTable
from penstock.safety.statistics import Moments, confidence_sequence, proportion_interval, welch

QUALITY = ExperimentPlan(primary="quality", planned_samples=2000)
UNKNOWN: Any = "unknown"
THREE = (Arm("1", 0.5), Arm("2", 0.3), Arm("3", 0.2))


def compared(
    plan: ExperimentPlan, gain: float = 0.0, jobs: int = 2000, *, share_b: float = 0.5, seed: int = 1
) -> ABModelComparison:
    """An experiment in which B's quality is `gain` standard deviations higher."""
    comparison = ABModelComparison("1", "2", share_b=share_b, salt="test", plan=plan)
    rng = np.random.default_rng(seed)
    for number in range(jobs):
        version = comparison.assign(f"minilm.{number:032x}")
        comparison.record(version, 5.0 + rng.random(), quality=rng.normal() + gain * (version == "2"))
    return comparison


class SteppedClock:
    """Each reading is `step` later."""

    def __init__(self, step: float = 0.25) -> None:
        self.step = step
        self.now = 0.0

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_20000_jobs_are_split_and_counted_by_arm():
    """Each arm has its share within 4 sigma; its failed jobs count in the denominator of its error rate (AR-085)."""
    comparison = ABModelComparison("1", "2", share_b=0.1, salt="split")
    for number in range(20_000):
        version = comparison.assign(f"minilm.{number:032x}")
        comparison.record(version, 4.0, is_error=number % 50 == 0)
    report = comparison.report()
    a, b = report["arms"]
    assert abs(b["requests"] - 2000) <= 4 * math.sqrt(20_000 * 0.1 * 0.9)
    assert a["requests"] + b["requests"] == 20_000
    assert a["errors"] + b["errors"] == 400
    for arm in (a, b):
        assert arm["error_rate"]["mean"] == arm["errors"] / arm["requests"]
        low, high = proportion_interval(arm["errors"], arm["requests"])
        assert (arm["error_rate"]["low"], arm["error_rate"]["high"]) == (low, high)
        assert arm["latency_ms"]["samples"] == arm["requests"] - arm["errors"]
    assert report["split"]["p_value"] > 0.001
    assert report["split"]["is_as_planned"] is True


@pytest.mark.parametrize(("is_higher_better", "expected"), [(True, "B"), (False, "A")])
def test_a_better_version_is_found(is_higher_better: bool, expected: str):
    """By the user's own metric, in the direction that the user calls better."""
    plan = ExperimentPlan(primary="quality", planned_samples=2000, is_higher_quality_better=is_higher_better)
    report = compared(plan, gain=0.5).report()
    assert report["verdict"] == expected
    assert report["opposed_by"] == []


def test_equal_versions_go_on():
    """Without a difference the verdict is `continue`."""
    assert compared(QUALITY).report()["verdict"] == "continue"


def test_lower_latency_is_better():
    """Without a quality metric the faster version wins."""
    comparison = ABModelComparison("1", "2", share_b=0.5, salt="s", plan=ExperimentPlan(planned_samples=400))
    rng = np.random.default_rng(2)
    for _ in range(200):
        comparison.record("1", rng.normal(10, 1))
        comparison.record("2", rng.normal(8, 1))
    assert comparison.report()["verdict"] == "B"


def test_two_versions_without_a_difference_that_matters_are_equivalent():
    """An experiment ends, too, when the whole interval is smaller than the smallest effect."""
    plan = ExperimentPlan(primary="quality", planned_samples=2000, smallest_effects={"quality": 0.3})
    assert compared(plan, jobs=2000).report()["verdict"] == "equivalent"
    assert compared(plan, jobs=250).report()["verdict"] == "continue"


def test_a_faster_version_that_fails_is_opposed():
    """The verdict is the primary metric's; a worse error rate is named beside it."""
    comparison = ABModelComparison("1", "2", share_b=0.5, salt="s", plan=ExperimentPlan(planned_samples=2000))
    rng = np.random.default_rng(3)
    for _ in range(1000):
        comparison.record("1", rng.normal(10, 1))
        comparison.record("2", rng.normal(8, 1), is_error=bool(rng.random() < 0.1))
    report = comparison.report()
    assert (report["verdict"], report["opposed_by"]) == ("B", ["error_rate"])


def test_no_verdict_before_the_sequence_begins():
    """Below `min_samples` per arm there is no interval for any time, however clear the difference seems."""
    comparison = ABModelComparison("1", "2", share_b=0.5, salt="s", plan=ExperimentPlan(min_samples=100))
    rng = np.random.default_rng(4)
    for number in range(100):
        assert comparison.report()["verdict"] == "continue", number
        comparison.record("1", rng.normal(100, 1))
        comparison.record("2", rng.normal(8, 1))
    assert comparison.report()["verdict"] == "B"


def test_two_constants_are_no_evidence():
    """Without any variance there is neither a p-value nor an interval for any time."""
    comparison = ABModelComparison("1", "2", share_b=0.5, salt="s")
    for _ in range(200):
        comparison.record("1", 2.0)
        comparison.record("2", 1.0)
    latency = comparison.report()["comparisons"][0]["metrics"]["latency_ms"]
    assert latency["once"]["difference"] == -1.0
    assert latency["once"]["p_value"] is None
    assert latency["any_time"] == {"low": None, "high": None, "verdict": "continue"}


def test_a_first_failure_of_a_small_arm_decides_nothing():
    """A flawless small arm has no variance of its own, and is not better than one with the usual failures."""
    plan = ExperimentPlan(primary="error_rate", planned_samples=1000)
    comparison = ABModelComparison("1", "2", share_b=0.1, salt="s", plan=plan)
    for number in range(900):
        comparison.record("1", 1.0, is_error=number % 100 < 3)
    for _ in range(100):
        comparison.record("2", 1.0)
    assert comparison.report()["verdict"] == "continue"


def test_the_report_has_welchs_test_as_scipy_computes_it():
    """p-value and interval of the one look, over the very observations (AR-016)."""
    comparison = ABModelComparison("1", "2", share_b=0.5, salt="s")
    rng = np.random.default_rng(5)
    a, b = rng.normal(10, 1, 30), rng.normal(10.5, 3, 12)
    for version, values in (("1", a), ("2", b)):
        for value in values:
            comparison.record(version, value)
    once = comparison.report()["comparisons"][0]["metrics"]["latency_ms"]["once"]
    expected = stats.ttest_ind(b, a, equal_var=False)
    assert once["p_value"] == pytest.approx(expected.pvalue, abs=1e-9)
    assert (once["low"], once["high"]) == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-9)


def test_the_report_says_when_the_one_look_is_due():
    """And what it can find: the power for the effect that matters, the samples that it needs."""
    plan = ExperimentPlan(primary="quality", planned_samples=500, smallest_effects={"quality": 0.2})
    early, late = compared(plan, jobs=499).report(), compared(plan, jobs=1000).report()
    assert (early["is_planned_look_due"], late["is_planned_look_due"]) == (False, True)
    once = [report["comparisons"][0]["metrics"]["quality"]["once"] for report in (early, late)]
    # 2 * (1.96 + 0.84)^2 / 0.2^2 per arm, at a variance of about 1.
    assert once[1]["samples_for_smallest_effect"] == pytest.approx(785, rel=0.15)
    assert once[0]["power_for_smallest_effect"] < 0.8 < once[1]["power_for_smallest_effect"]
    assert once[0]["detectable_difference"] > 0.2 > once[1]["detectable_difference"]


def test_the_report_is_plain_data_at_any_time():
    """Before the first job, after one, and after many: JSON without NaN or infinity."""
    for jobs in (0, 1, 2, 3, 50, 500):
        report = compared(QUALITY, jobs=jobs).report()
        assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_a_wrong_split_is_told():
    """When an arm loses jobs, its figures are not to be believed."""
    comparison = ABModelComparison("1", "2", share_b=0.5, salt="s")
    for number in range(1000):
        version = comparison.assign(f"minilm.{number}")
        if version == "1" or number % 4:
            comparison.record(version, 1.0)
    assert comparison.report()["split"]["is_as_planned"] is False


def test_a_sticky_experiment_says_what_it_assumes():
    """Jobs of one key come together: no test of their counts, and a caveat about the intervals."""
    comparison = ABModelComparison("1", "2", share_b=0.5, salt="s", is_sticky=True)
    version = comparison.assign("minilm.0", "user 1")
    for number in range(1000):
        assert comparison.assign(f"minilm.{number}", "user 1") == version
        comparison.record(version, 1.0)
    report = comparison.report()
    assert report["split"]["p_value"] is None
    assert any("sticky" in caveat for caveat in report["caveats"])


def test_in_the_shadow_a_answers_everything():
    """B runs its share of the jobs again, and no job has B's answer (AR-006)."""
    comparison = ABModelComparison("1", "2", share_b=0.25, salt="s", mode="shadow")
    ids = [f"minilm.{number}" for number in range(4000)]
    assert {comparison.assign(job_id) for job_id in ids} == {"1"}
    shadowed = Counter(comparison.shadow(job_id) for job_id in ids)
    assert set(shadowed) == {"2", None}
    assert abs(shadowed["2"] - 1000) <= 4 * math.sqrt(4000 * 0.25 * 0.75)
    for job_id in ids:
        for version in {comparison.assign(job_id), comparison.shadow(job_id) or "1"}:
            comparison.record(version, 1.0)
    report = comparison.report()
    assert (report["mode"], report["split"]["is_as_planned"]) == ("shadow", None)
    split = ABModelComparison("1", "2", share_b=0.25, salt="s")
    assert {split.shadow(job_id) for job_id in ids} == {None}


def test_the_reports_of_two_workers_are_merged():
    """Statistics travel as bytes, and the merged report is that of one worker that saw all jobs."""
    one, other, whole = (ABModelComparison("1", "2", share_b=0.5, salt="s", plan=QUALITY) for _ in range(3))
    rng = np.random.default_rng(6)
    for number in range(600):
        version, quality = whole.assign(f"minilm.{number}"), rng.normal()
        for comparison in (whole, (one, other)[number % 2]):
            comparison.record(version, quality + 10, is_error=number % 7 == 0, quality=quality)
    travelled = msgspec.msgpack.encode(dict(other.statistics))
    one.merge(msgspec.msgpack.decode(travelled, type=dict[str, ArmStatistics]))
    for version, expected in whole.statistics.items():
        found = one.statistics[version]
        assert (found.requests, found.errors) == (expected.requests, expected.errors)
        assert found.latency_ms.m2 == pytest.approx(expected.latency_ms.m2)
        assert found.quality.mean == pytest.approx(expected.quality.mean)


def test_three_arms_have_one_winner_over_all_pairs():
    """A version wins when it beats every other one; alpha is divided by the number of pairs (AR-091)."""
    comparison = MultiModelComparison(RoutingTable(THREE, "n"), QUALITY)
    rng = np.random.default_rng(7)
    for number in range(4000):
        version = comparison.assign(f"minilm.{number}")
        comparison.record(version, 1.0, quality=rng.normal() + (version == "3"))
    report = comparison.report()
    assert report["verdict"] == "3"
    assert [(pair["a"], pair["b"]) for pair in report["comparisons"]] == [("1", "2"), ("1", "3"), ("2", "3")]
    assert {pair["alpha"] for pair in report["comparisons"]} == {0.05 / 3}
    found = report["comparisons"][0]["metrics"]["quality"]
    assert found["any_time"]["verdict"] == "continue"
    one, two = (comparison.statistics[version].quality for version in ("1", "2"))
    assert (found["once"]["low"], found["once"]["high"]) == welch(one, two).interval(1 - 0.05 / 3)
    assert (found["any_time"]["low"], found["any_time"]["high"]) == confidence_sequence(one, two, 2000, 0.05 / 3)
    assert report["split"]["is_as_planned"] is True


def test_one_beaten_arm_is_no_winner():
    """When two of three arms are equally good, none of them is better than all others."""
    comparison = MultiModelComparison(RoutingTable(THREE, "n"), QUALITY)
    rng = np.random.default_rng(8)
    for number in range(4000):
        version = comparison.assign(f"minilm.{number}")
        comparison.record(version, 1.0, quality=rng.normal() - (version == "3"))
    report = comparison.report()
    verdicts = [pair["metrics"]["quality"]["any_time"]["verdict"] for pair in report["comparisons"]]
    assert (report["verdict"], verdicts) == ("continue", ["continue", "1", "2"])


def test_failed_jobs_have_the_quality_that_the_plan_gives_them():
    """Otherwise a version that fails hard cases would have the better answers."""
    counted = ABModelComparison("1", "2", share_b=0.5, salt="s", plan=ExperimentPlan(quality_of_error=0.0))
    ignored = ABModelComparison("1", "2", share_b=0.5, salt="s")
    for comparison in (counted, ignored):
        comparison.record("1", 1.0, quality=1.0)
        comparison.record("1", 1.0, is_error=True)
    assert counted.statistics["1"].quality == Moments.of([1.0, 0.0])
    assert ignored.statistics["1"].quality == Moments.of([1.0])


def test_a_quality_that_is_no_number_is_counted_apart():
    """The answer stays an answer, and the mean stays finite."""
    comparison = ABModelComparison("1", "2", share_b=0.5, salt="s")
    for quality in (math.nan, math.inf, 0.5, None):
        comparison.record("1", 1.0, quality=quality)
    seen = comparison.statistics["1"]
    assert (seen.requests, seen.unrated, seen.quality) == (4, 2, Moments.of([0.5]))


@pytest.mark.parametrize("latency_ms", [-1.0, math.nan, math.inf])
def test_an_impossible_outcome_is_refused_whole(latency_ms: float):
    """Nothing of it is counted; the same holds for a version that is no arm, alone or among others."""
    comparison = ABModelComparison("1", "2", share_b=0.5, salt="s")
    with pytest.raises(InvalidInput, match="expected a finite number of at least 0"):
        comparison.record("1", latency_ms)
    with pytest.raises(InvalidInput, match=r"Unknown arm '3'\. Expected one of: 1, 2"):
        comparison.record("3", 1.0)
    with pytest.raises(InvalidInput, match="Unknown arm"):
        comparison.merge({"1": ArmStatistics(requests=5), "3": ArmStatistics()})
    assert comparison.statistics == {"1": ArmStatistics(), "2": ArmStatistics()}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ABModelComparison("1", "2", share_b=1.5, salt="s"), "share_b is 1.5, expected"),
        (lambda: ABModelComparison("1", "1", share_b=0.5, salt="s"), "'1' is there twice"),
        (lambda: ABModelComparison("1", "2", share_b=0.5, salt=""), "salt is empty"),
        (lambda: ABModelComparison("1", "2", share_b=0.5, salt="s", mode=UNKNOWN), "one of: split, shadow"),
        (lambda: MultiModelComparison(RoutingTable((Arm("1", 1.0),), "s")), "1 arm, expected at least 2"),
        (lambda: MultiModelComparison(RoutingTable((Arm("1", 0.5), Arm("2", 0.4)), "s")), "add up to 0.9"),
        (lambda: ExperimentPlan(primary=UNKNOWN).check(), "Expected one of: latency_ms, error_rate, quality"),
        (lambda: ExperimentPlan(smallest_effects={UNKNOWN: 1.0}).check(), "Unknown metric 'unknown'"),
        (lambda: ExperimentPlan(smallest_effects={"quality": 0.0}).check(), "expected a number above 0"),
        (lambda: ExperimentPlan(smallest_effects={"error_rate": 1.0}).check(), "expected a share of jobs below 1"),
        (lambda: ExperimentPlan(alpha=0.0).check(), "alpha is 0.0, expected"),
        (lambda: ExperimentPlan(power=1.0).check(), "power is 1.0, expected"),
        (lambda: ExperimentPlan(min_samples=1).check(), "min_samples is 1, expected at least 2"),
        (lambda: ExperimentPlan(planned_samples=0).check(), "planned_samples is 0, expected at least 4"),
        (lambda: ExperimentPlan(quality_of_error=math.nan).check(), "finite number or none"),
    ],
)
def test_an_experiment_that_cannot_be_carried_out_is_refused(make: Callable[[], object], message: str):
    """The error says what is expected."""
    with pytest.raises(InvalidInput, match=message):
        make()


def served(*traffic: float, **options: Any) -> ABTestingServer:
    """Models named m0, m1, ..., whose answer is their number."""
    server = ABTestingServer(SteppedClock(), **options)
    for number, share in enumerate(traffic):
        server.register_model(f"m{number}", lambda _, number=number: number, share)
    return server


@pytest.mark.parametrize("traffic", [1.5, -0.1, math.nan])
def test_traffic_outside_0_to_1_is_a_value_error(traffic: float):
    """And the server stays as it was (CX-039)."""
    server = served(0.5)
    with pytest.raises(ValueError, match="expected a number 0 to 1"):
        server.register_model("other", str, traffic)
    assert server.predict(None) == (0, "m0")


def test_traffic_above_1_in_all_is_a_value_error():
    """As are a version that is there already, and a model that cannot be called."""
    server = served(0.7)
    with pytest.raises(ValueError, match=r"adds up to 1\.1, expected at most 1"):
        server.register_model("m1", str, 0.4)
    with pytest.raises(ValueError, match="registered already"):
        server.register_model("m0", str, 0.1)
    not_a_model: Any = "weights.bin"
    with pytest.raises(ValueError, match="expected a callable"):
        server.register_model("m1", not_a_model, 0.1)
    assert {server.predict(None)[1] for _ in range(50)} == {"m0"}


@pytest.mark.parametrize(
    ("traffic", "shares"),
    [
        ((0.7, 0.3), (0.7, 0.3)),
        ((0.2, 0.1, 0.3), (0.6, 0.1, 0.3)),
        ((0.0, 0.25), (0.75, 0.25)),
        ((0.0, 0.0), (1.0, 0.0)),
        ((0.1,) * 10, (0.1,) * 10),
    ],
)
def test_predictions_come_from_the_version_named_beside_them(traffic: tuple[float, ...], shares: tuple[float, ...]):
    """The shares are cumulative, and the remainder of a sum below 1 goes to the first model (CX-040)."""
    server = served(*traffic)
    answers = [server.predict(None) for _ in range(5000)]
    assert all(version == f"m{prediction}" for prediction, version in answers)
    found = Counter(version for _, version in answers)
    for number, share in enumerate(shares):
        assert abs(found[f"m{number}"] - 5000 * share) <= 4 * math.sqrt(5000 * share * (1 - share))


def test_a_key_keeps_its_version():
    """Requests without a key are divided, those of one key are not."""
    server = served(0.5, 0.5)
    assert len({server.predict(None, "user 1")[1] for _ in range(50)}) == 1
    assert len({server.predict(None)[1] for _ in range(50)}) == 2
    assert len({server.predict(None, f"user {number}")[1] for number in range(50)}) == 2


def test_the_server_measures_and_rates_each_version():
    """Latency by its clock, quality by the user's metric; a metric that raises costs no answer."""

    def quality(inputs: int, prediction: int) -> float:
        if inputs == 13:
            raise ZeroDivisionError
        return float(inputs + prediction)

    server = served(0.5, 0.5, quality=quality)
    answers = [server.predict(inputs, str(inputs)) for inputs in range(40)]
    arms = {arm["version"]: arm for arm in server.report()["arms"]}
    for version, arm in arms.items():
        rated = [inputs + prediction for inputs, (prediction, name) in enumerate(answers) if name == version]
        assert arm["requests"] == len(rated) > 0
        assert arm["latency_ms"]["mean"] == pytest.approx(250.0)
    assert sum(arm["unrated"] for arm in arms.values()) == 1
    assert sum(arm["quality"]["samples"] for arm in arms.values()) == 39


def test_a_models_error_reaches_the_caller_and_is_counted():
    """An A/B test hides no failure (AR-085)."""
    server = ABTestingServer(SteppedClock())
    server.register_model("right", lambda inputs: inputs, 0.5)
    server.register_model("wrong", lambda inputs: inputs / 0, 0.5)
    raised = 0
    for inputs in range(100):
        try:
            server.predict(inputs)
        except ZeroDivisionError:
            raised += 1
    right, wrong = server.report()["arms"]
    assert (right["errors"], wrong["errors"], wrong["requests"]) == (0, raised, raised)
    assert raised > 0
    assert right["requests"] + raised == 100


def test_a_new_version_begins_a_new_experiment():
    """Outcomes under other shares are not mixed with those of now, not even of a request that is still running."""

    def registers(_: object) -> str:
        server.register_model("third", str, 0.0)
        # A request of the old shares ends under the new ones.
        return "late"

    server = ABTestingServer(SteppedClock())
    server.register_model("first", registers, 0.5)
    server.register_model("second", registers, 0.5)
    assert server.predict(None)[0] == "late"
    assert [arm["requests"] for arm in server.report()["arms"]] == [0, 0, 0]


def test_requests_of_several_threads_are_all_counted():
    """None is lost when they end together."""
    server = served(0.5, 0.5)
    threads = [threading.Thread(target=lambda: [server.predict(None) for _ in range(500)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(arm["requests"] for arm in server.report()["arms"]) == 2000


def test_a_server_without_models_says_so():
    """Before `register_model` there is nothing to ask, and with one version nothing to compare."""
    server = ABTestingServer(SteppedClock())
    with pytest.raises(InvalidInput, match="expected `register_model` before"):
        server.predict(None)
    with pytest.raises(InvalidInput, match="expected"):
        server.report()
    with pytest.raises(InvalidInput, match="expected at least 2"):
        served(1.0).report()
