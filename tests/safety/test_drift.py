"""Drift of a metric: the chart equals its closed form, finds a shift soon, and leaves a steady series alone. AR-065."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from math import inf, nan, sqrt
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.broker.breakers import BreakerLimits
from penstock.registry.errors import InvalidInput
from penstock.registry.settings_sections import SafetyConfig
from penstock.safety.breaker import MemoryBreakers
from penstock.safety.drift import Adwin, DriftLimits, DriftMonitor, Ewma, Reference
from penstock.safety.validators import WorseSide

Values = npt.NDArray[np.float64]

SEED: Final = 15
REFERENCE: Final = 500
COSINES: Final = Path(__file__).with_name("minilm_int8_cosines.npy")
"""Between MiniLM in fp32 and in dynamic int8, over the docstrings of `compose/docstrings.py` in Python 3.11: 5,106 real
pairs, recorded by `python -m tests.benchmarks.drift FILE`. Mean 0.884, deviation 0.028, skewness -1.0, kurtosis 5.2."""


def _gaussian() -> Values:
    return np.random.default_rng(SEED).standard_normal(120_000)


def _cosines() -> Values:
    found: Values = np.load(COSINES).astype(np.float64)
    return found


SERIES: Final[dict[str, Callable[[], Values]]] = {"gaussian": _gaussian, "minilm cosine": _cosines}


def monitor_of(values: Values, rng: np.random.Generator, worse: WorseSide = "either", **limits: float) -> DriftMonitor:
    """One whose reference window is a sample of these values."""
    window = rng.choice(values, REFERENCE, replace=False)
    return DriftMonitor("cosine", worse, DriftLimits(**limits), Reference(window))  # type: ignore[arg-type]


@given(st.lists(st.floats(-5, 5), max_size=80), st.floats(0.01, 1))
def test_the_ewma_equals_its_closed_form(values: Sequence[float], smoothing: float):
    """z(t) = smoothing * sum of (1 - smoothing)^(t-i) * x(i)."""
    ewma = Ewma(smoothing)
    for value in values:
        ewma.add(value)
    length = len(values)
    closed = smoothing * sum((1 - smoothing) ** (length - i) * value for i, value in enumerate(values, 1))
    assert ewma.value == pytest.approx(closed, abs=1e-9)
    assert ewma.count == length


def test_the_control_limits_equal_their_closed_form():
    """The deviation of z(t), by simulation over many series and by the formula, with the estimate of the mean."""
    rng = np.random.default_rng(SEED)
    smoothing, window, length, repeats = 0.1, 50, 30, 40_000
    drawn = rng.standard_normal((repeats, length)) - rng.standard_normal((repeats, 1)) / sqrt(window)
    smoothed, ewma = np.zeros(repeats), Ewma(smoothing)
    for column in drawn.T:
        smoothed += smoothing * (column - smoothed)
        ewma.add(0.0)
        assert ewma.deviation(window) == pytest.approx(smoothed.std(), rel=0.02)
    steady = Ewma(smoothing, count=10_000)
    assert steady.deviation(10**9) == pytest.approx(sqrt(smoothing / (2 - smoothing)), rel=1e-6)


@pytest.mark.parametrize("name", SERIES)
def test_a_steady_series_raises_no_alarm(name: str):
    """100,000 values like those of the reference window: at most one alarm, in either direction."""
    values, rng = SERIES[name](), np.random.default_rng(SEED)
    monitor, alarms = monitor_of(values, rng), 0
    for value in rng.choice(values, 100_000).tolist():
        if monitor.observe(value) is not None:
            alarms += 1
            monitor.reset()
    assert monitor.count + alarms > 1000
    assert alarms <= 1


@pytest.mark.parametrize("adwin_delta", [None, 0.002])
@pytest.mark.parametrize("name", SERIES)
def test_a_shift_of_two_deviations_is_found_soon(name: str, adwin_delta: float | None):
    """Within 50 values after 200 steady ones, in each of 100 runs; a shift to the better raises no alert."""
    values, rng = SERIES[name](), np.random.default_rng(SEED)
    shift = 2 * values.std()
    for _ in range(100):
        monitor = monitor_of(values, rng, "lower", adwin_delta=adwin_delta)  # type: ignore[arg-type]
        better = monitor_of(values, rng, "lower", adwin_delta=adwin_delta)  # type: ignore[arg-type]
        steady, later = rng.choice(values, 200).tolist(), rng.choice(values, 50)
        assert [monitor.observe(value) for value in steady] == [None] * 200
        alerts = [alert for value in (later - shift).tolist() if (alert := monitor.observe(value)) is not None]
        assert [alert.detector for alert in alerts] in (["ewma"], ["adwin"])
        assert all(better.observe(value) is None for value in (later + shift).tolist())


def test_one_alert_opens_the_breaker():
    """A monitor alerts once, however long the drift lasts, and that alert is enough (AR-073)."""
    breakers, name = MemoryBreakers(lambda: 0), "minilm/2:int8"
    values, rng = _cosines(), np.random.default_rng(SEED)
    monitor = monitor_of(values, rng, "lower")
    alerts = [alert for _ in range(500) if (alert := monitor.observe(0.7)) is not None]
    (alert,) = alerts
    assert monitor.alert is alert
    assert alert.reason.startswith("drift: cosine is lower than in its reference window (ewma ")
    opened = breakers.force_open_breaker(name, alert.reason, "a", BreakerLimits())
    assert opened.did
    assert breakers.breakers("minilm").records[name].circuit == "open"
    monitor.reset()
    assert any(monitor.observe(0.7) for _ in range(50))


def test_an_outlier_is_no_drift():
    """A single value raises no alert, however far away it is; NaN counts as the worst value there is."""
    values, rng = _cosines(), np.random.default_rng(SEED)
    for worst in (-1.0, -1e9, nan, inf, -inf):
        monitor = monitor_of(values, rng, "lower")
        assert monitor.observe(worst) is None
        assert monitor.score < 0 or worst == inf
    monitor = monitor_of(values, rng, "lower")
    assert any(monitor.observe(nan) for _ in range(30)), "a candidate whose figures are NaN does drift"


@given(st.lists(st.integers(-1000, 1000), min_size=20, max_size=60, unique=True))
def test_scores_depend_on_ranks_only(values: Sequence[int]):
    """The chart is the same for a metric on another scale that keeps the order."""
    reference, cubed = Reference(values[::2]), Reference([value**3 for value in values[::2]])
    scores = {value: reference.score(value) for value in values}
    assert scores == {value: cubed.score(value**3) for value in values}
    assert [scores[value] for value in sorted(values)] == sorted(scores.values())
    assert sum(map(reference.score, reference.values)) == pytest.approx(0, abs=1e-6)


def test_a_constant_metric_is_watched():
    """An agreement of 1.0 in the whole window: more of it is steady, and many lower values are a drift."""
    monitor = DriftMonitor("agreement", "lower", reference=Reference([1.0] * 200))
    assert all(monitor.observe(1.0) is None for _ in range(1000))
    assert monitor.score == pytest.approx(0, abs=1e-9)
    assert any(monitor.observe(0.99) for _ in range(30))


def test_the_first_values_are_the_reference():
    """Until there are enough of them nothing alerts; NaN is left out of the window."""
    monitor = DriftMonitor("cosine", "lower", DriftLimits(reference_size=50))
    rng = random.Random(SEED)
    assert monitor.observe(nan) is None
    assert [monitor.observe(rng.gauss(0, 1)) for _ in range(50)] == [None] * 50
    assert monitor.reference is not None
    assert len(monitor.reference) == 50
    assert any(monitor.observe(rng.gauss(-2, 1)) for _ in range(50))


@pytest.mark.parametrize("gathered", [30, 90])
def test_a_stored_monitor_goes_on(gathered: int):
    """Within its reference window and after it: the later alerts are those of a monitor that was never stored."""
    rng = random.Random(SEED)
    values = [rng.gauss(0, 1) for _ in range(gathered)] + [rng.gauss(-2.5, 1) for _ in range(100)]
    limits = DriftLimits(reference_size=50)
    through, before = (DriftMonitor("cosine", "lower", limits) for _ in range(2))
    for value in values[:gathered]:
        assert through.observe(value) == before.observe(value)
    after = DriftMonitor.from_data(json.loads(json.dumps(before.as_data())), limits)
    assert [after.observe(value) for value in values[gathered:]] == [
        through.observe(value) for value in values[gathered:]
    ]
    assert after.alert is not None or gathered == 30


def test_a_stored_window_of_adwin_goes_on():
    """A small change that lasts, which the chart does not see, is found with the values from before the restart."""
    rng = random.Random(SEED)
    limits = DriftLimits(adwin_delta=0.002, width=100.0)
    before = DriftMonitor("cosine", "lower", limits)
    for _ in range(1200):
        assert before.observe(rng.gauss(0, 1)) is None
    after = DriftMonitor.from_data(json.loads(json.dumps(before.as_data())), limits)
    values = [rng.gauss(-0.5, 1) for _ in range(400)]
    found, expected = ([each.observe(value) for value in values] for each in (after, before))
    assert [alert and alert.count for alert in found] == [alert and alert.count for alert in expected]
    (alert,) = filter(None, found)
    assert alert.detector == "adwin"
    # Without a window of ADWIN there is nothing to go on from.
    assert DriftMonitor.from_data(before.as_data(), DriftLimits()).observe(0.0) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"reference": [nan] * 200},
        {"reference": ["x"]},
        {"reference": [1.0] * 199},
        {"reference": 7},
        {"is_complete": False, "reference": [inf]},
        {"worse": "down"},
        {"worse": ["lower"]},
        {"score": nan},
        {"score": "much"},
        {"count": -1},
        {"adwin": {"rows": [], "added": 1}},
        {"adwin": {"rows": [[[0.5, 0.25]] * 6], "added": 1}},
        {"adwin": {"rows": [[[2.0, 1.0]]], "added": 1}},
        {"adwin": {"rows": [[[nan, 0.0]]], "added": 1}},
        {"adwin": {"rows": [[[0.5]]], "added": 1}},
        {"adwin": []},
    ],
)
def test_a_stored_state_that_is_none_is_refused(changes: dict[str, object]):
    """It comes over the wire, and may be that of other settings."""
    limits = DriftLimits(adwin_delta=0.002)
    monitor = DriftMonitor("cosine", "lower", limits)
    for number in range(300):
        monitor.observe(float(number % 7))
    assert DriftMonitor.from_data(monitor.as_data(), limits).count == 100
    with pytest.raises(InvalidInput, match="Expected"):
        DriftMonitor.from_data({**monitor.as_data(), **changes}, limits)
    with pytest.raises(InvalidInput, match="Expected that of as_data"):
        DriftMonitor.from_data({"metric": "cosine"}, limits)


def test_limits_of_the_settings():
    """By default those of the class; ADWIN is off at 0."""
    assert DriftLimits.of(SafetyConfig()) == DriftLimits()
    config = SafetyConfig(drift_smoothing=0.1, drift_width=4, drift_reference_size=50, drift_adwin_delta=0.01)
    assert DriftLimits.of(config) == DriftLimits(0.1, 4.0, 50, 0.01)


def test_adwin_finds_a_change_and_drops_the_values_before_it():
    """A steady window grows and costs little; after a change only newer values are left."""
    rng = random.Random(SEED)
    adwin = Adwin()
    assert all(adwin.add(rng.random()) is None for _ in range(20_000))
    assert len(adwin) == 20_000
    assert adwin.mean == pytest.approx(0.5, abs=0.02)
    assert sum(map(len, adwin._rows)) <= 6 * 16
    found = next(change for _ in range(500) if (change := adwin.add(rng.random() / 2)) is not None)
    assert found[0] < -found[1] < 0
    for _ in range(2000):
        adwin.add(rng.random() / 2)
    assert len(adwin) < 3000
    assert adwin.mean == pytest.approx(0.25, abs=0.03)


@given(st.lists(st.floats(0, 1), max_size=200))
def test_adwin_keeps_the_sums_of_its_window(values: Sequence[float]):
    """Its buckets are the latest values, and none is lost or counted twice."""
    adwin = Adwin()
    for value in values:
        adwin.add(value)
    window = values[len(values) - len(adwin) :]
    assert sum(len(row) << size for size, row in enumerate(adwin._rows)) == len(adwin)
    assert adwin._sum == pytest.approx(sum(window), abs=1e-9)
    assert all(len(row) <= Adwin._BUCKETS for row in adwin._rows)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"smoothing": 0}, "smoothing is 0"),
        ({"smoothing": 1.5}, "smoothing is 1.5"),
        ({"width": 0}, "width is 0"),
        ({"reference_size": 1}, "reference_size is 1"),
        ({"adwin_delta": 1}, "adwin_delta is 1"),
    ],
)
def test_unusable_limits_are_refused(limits, said):
    """The message says what was found and what is expected."""
    with pytest.raises(InvalidInput, match=rf"{said}.*Expected"):
        DriftLimits(**limits)


def test_unusable_windows_and_data_are_refused():
    """Too small a window, NaN in it, an unknown side, foreign data, values that ADWIN cannot have."""
    with pytest.raises(InvalidInput, match=r"has 3 values\. Expected at least 200"):
        DriftMonitor("cosine", "lower", reference=Reference([1, 2, 3]))
    with pytest.raises(InvalidInput, match="NaN or infinity"):
        Reference([1.0, nan])
    with pytest.raises(InvalidInput, match="Expected one of: lower, higher, either"):
        DriftMonitor("cosine", "down")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="from 0 to 1"):
        Adwin().add(1.5)
