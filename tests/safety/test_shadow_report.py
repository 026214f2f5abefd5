"""The figures of a shadow: shares and means with intervals, and drift. AR-065, AR-088."""

from __future__ import annotations

import json
import random

import pytest

from penstock.safety.drift import DriftLimits
from penstock.safety.shadow_report import drift_of, report_of


def test_shares_and_means_have_the_intervals_of_the_statistics():
    """81 of 263 is the example of Newcombe 1998, table I; the mean of five values is Student's."""
    fields = {"n:pass": "81", "n:fail": "182", "f:y": "5 3 10 1 5", "f:one": "1 2 0 2 2"}
    found = report_of(fields)
    assert found["agreement_interval"] == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert found["figures"]["y"]["interval"] == pytest.approx((1.0368, 4.9632), abs=5e-5)
    assert found["figures"]["y"]["deviation"] == pytest.approx(1.5811, abs=5e-5)
    assert found["figures"]["one"]["interval"] is None


def test_a_share_of_nothing_has_no_interval():
    """No pair was compared."""
    assert report_of({})["agreement_interval"] is None


def test_a_shift_is_found_and_steady_values_are_none():
    """Two sigmas, within 50 values. A steady series as long as the one that is kept never, nor equal values."""
    draw = random.Random(3)
    steady = [draw.gauss(1, 0.1) for _ in range(10_000)]
    shifted = drift_of("y", steady[:300] + [draw.gauss(1.2, 0.1) for _ in range(50)])
    assert shifted is not None
    assert 300 <= shifted["out_at"] < 350
    assert "y is higher" in shifted["reason"]
    for values in (steady, [1.0] * 300, [1.0] * 200 + [1.0 - 1e-15] * 300):
        found = drift_of("y", values)
        assert found is not None
        assert (found["out_at"], found["reason"]) == (None, "")


def test_report_looks_for_drift_as_the_shadow_worker_does():
    """With the limits of the settings, and on the side on which the figure gets worse, where the state tells it."""
    draw = random.Random(3)
    values = [draw.gauss(1, 0.1) for _ in range(300)] + [draw.gauss(1.2, 0.1) for _ in range(50)]
    series = [json.dumps({"outcome": "pass", "y": value}) for value in values]

    def out_at(drift: str = "", limits: DriftLimits | None = None) -> object:
        found = report_of({"f:y": "350 1 0 1 1", "drift": drift}, series, limits)["figures"]["y"]["drift"]
        return found and found["out_at"]

    assert out_at() is not None
    assert out_at(limits=DriftLimits(width=100)) is None
    assert out_at(json.dumps({"monitors": [{"metric": "y", "worse": "lower"}]})) is None
    assert out_at(json.dumps({"monitors": [{"metric": "y", "worse": "higher"}]})) is not None
    for foreign in ("{", "[]", '{"monitors": 7}', '{"monitors": [{"metric": "y", "worse": "down"}]}'):
        assert out_at(foreign) is not None


def test_too_few_values_have_no_drift():
    """There is nothing beyond the reference."""
    assert drift_of("y", [1.0] * 200) is None


def test_failures_of_the_candidate_count_as_disagreement():
    """Orphans do not: they were not compared."""
    fields = {"n:pass": "6", "n:fail": "1", "n:error": "1", "n:timeout": "1", "n:crashed": "1", "n:expired": "90"}
    found = report_of(fields)
    assert (found["compared"], found["agreement"]) == (10, 0.6)
    assert found["outcomes"]["expired"] == 90


def test_bad_fields_are_left_out():
    """Another program may write to the report."""
    fields = {"n:pass": "x", "f:y": "1 2", "f:z": "1 2 0 2 2", "id": "1", "f:w": "a b c d e"}
    found = report_of(fields, ["{", "[1]", json.dumps({"z": "text", "outcome": "pass"})])
    assert found["outcomes"] == {}
    assert found["agreement"] is None
    assert list(found["figures"]) == ["z"]
