"""What workers count of the arms: sums of workers, quantiles, and bytes that no worker wrote."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.safety.arm_figures import ArmFigures, merged, observation_field, read_observations

SECONDS = st.lists(st.floats(1e-5, 1e3), min_size=1, max_size=200)


def figures_of(seconds: list[float], *, errors: int = 0, cached: int = 0) -> ArmFigures:
    figures = ArmFigures(jobs=len(seconds) + errors + cached, errors=errors, cached=cached)
    figures.add_latencies(seconds)
    return figures


@given(SECONDS, SECONDS)
def test_sums_of_two_workers_are_the_figures_of_all_their_jobs(one: list[float], two: list[float]):
    """Mean and variance are those of all latencies together, within rounding, and so are the buckets."""
    both, together = merged([figures_of(one), figures_of(two)]), figures_of(one + two)
    assert (both.jobs, both.buckets) == (together.jobs, together.buckets)
    assert both.mean_s == pytest.approx(float(np.mean(one + two)))
    assert both.latency_s.m2 == pytest.approx(float(np.var(one + two) * len(one + two)), rel=1e-6, abs=1e-9)


@given(SECONDS, st.floats(0, 1))
def test_quantile_is_within_its_accuracy_of_an_observed_latency(seconds: list[float], share: float):
    """The quantile is at most 5 % away from the latency of its rank."""
    rank = int(share * (len(seconds) - 1))
    assert figures_of(seconds).quantile_s(share) == pytest.approx(sorted(seconds)[rank], rel=0.0501)


def test_jobs_beyond_a_latency_are_counted_to_a_bucket():
    """Of latencies far from the limit, each is counted on its side."""
    figures = figures_of([0.01] * 7 + [1.0] * 3)
    assert [figures.beyond(limit) for limit in (0.001, 0.1, 10.0)] == [10, 3, 0]


def test_empty_figures_have_no_rate_and_no_latency():
    """Without a job there is no number, in place of a zero that looks like one."""
    empty = ArmFigures()
    assert (empty.error_rate, empty.mean_s, empty.quantile_s(0.95)) == (None, None, None)


def test_written_totals_are_read_by_epoch_and_version():
    """Two workers and two epochs: a repeated write of one worker counts once."""
    one, two = figures_of([0.1, 0.2]), figures_of([0.3], errors=1)
    written = {
        observation_field(7, "w0:a"): msgspec.json.encode({"1": one, "2": two}),
        observation_field(7, "w1:b"): msgspec.json.encode({"2": two}),
        observation_field(8, "w0:a"): msgspec.json.encode({"2": one}),
    }
    found = read_observations(written)
    assert {epoch: sorted(arms) for epoch, arms in found.items()} == {7: ["1", "2"], 8: ["2"]}
    assert (found[7]["2"].jobs, found[7]["2"].errors, found[7]["2"].latency_s.count) == (4, 2, 2)
    assert found[7]["1"] == one


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seven w0:a", b"{}"),
        ("7", b'{"1": {}}'),
        ("7 w0:a", b"\xff"),
        ("7 w0:a", b'{"1": {"jobs": -1}}'),
        ("7 w0:a", b'{"1": {"jobs": 1, "errors": 2}}'),
        ("7 w0:a", b'{"1": {"jobs": 5, "latency_s": [5, 0.1, 0.0], "buckets": {"1": 4}}}'),
        ("9" * 30 + " w0:a", b'{"1": {}}'),
    ],
)
def test_bytes_that_no_worker_has_written_so_are_left_out(field: str, value: bytes):
    """Another program may write into the hash: impossible counts decide nothing."""
    sound = observation_field(7, "w1:b"), msgspec.json.encode({"1": ArmFigures(jobs=1, cached=1)})
    found = read_observations(dict([(field, value), sound]))
    assert {epoch: {label: arm.jobs for label, arm in arms.items()} for epoch, arms in found.items()} == {7: {"1": 1}}
