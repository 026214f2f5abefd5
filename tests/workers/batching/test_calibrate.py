"""Calibration of `max_batch_size = 0` on a simulated device: the chosen rows fit, and no more rows do."""

from __future__ import annotations

from collections.abc import Callable
from math import log2

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.errors import ConfigurationError
from penstock.workers.batching.calibrate import Calibration, MemoryReading, calibrate

MIB = 1 << 20
GIB = 1 << 30
SEGMENT = 20 * MIB
"""torch's allocator reserves large blocks in segments of this size."""

plants = st.tuples(
    st.integers(0, 70 * GIB),  # weights and other processes
    st.integers(1, 3 * GIB),  # bytes of one row
    st.floats(0.5, 2.0),  # how they grow with the rows: 1.0 is a line
    st.sampled_from([1, 2 * MIB, SEGMENT]),
)


class Device:
    """A device of 80 GiB; a forward of n rows needs `base + row * n ** power`, rounded up to segments."""

    total_bytes = 80 * GIB

    def __init__(self, base: int, row: int, power: float = 1.0, segment: int = 1) -> None:
        self.needs: Callable[[int], int] = lambda rows: -(-int(base + row * rows**power) // segment) * segment
        self.forwards = 0

    def probe(self, rows: int) -> MemoryReading:
        self.forwards += 1
        needed = self.needs(rows)
        return MemoryReading(rows, needed if needed <= self.total_bytes else None)

    def calibrated(self, headroom_pct: int, ceiling: int = 512) -> Calibration:
        return calibrate(self.probe, total_bytes=self.total_bytes, headroom_pct=headroom_pct, ceiling=ceiling)

    def most(self, headroom_pct: int, ceiling: int = 512) -> int:
        """By trying every size."""
        limit = self.total_bytes * (100 - headroom_pct) // 100
        return next((rows for rows in range(ceiling, 0, -1) if self.needs(rows) <= limit), 0)


@given(plant=plants, headroom_pct=st.integers(0, 99), ceiling=st.integers(1, 600))
def test_the_largest_batch_that_leaves_the_headroom_is_found(
    plant: tuple[int, int, float, int], headroom_pct: int, ceiling: int
):
    """Whatever the weights take, and however memory grows: what is chosen was run within the limit, one row more is
    not, and it took few forwards."""
    device = Device(*plant)
    most = device.most(headroom_pct, ceiling)
    if not most:
        with pytest.raises(ConfigurationError, match=f"One row does not leave {headroom_pct} %"):
            device.calibrated(headroom_pct, ceiling)
        return
    found = device.calibrated(headroom_pct, ceiling)
    assert found.rows == most
    used = next(reading.used_bytes for reading in found.readings if reading.rows == found.rows)
    assert used is not None
    assert used <= found.limit_bytes == device.total_bytes * (100 - headroom_pct) // 100
    assert device.forwards <= 3 * log2(ceiling) + 3


@given(plant=plants, headrooms=st.lists(st.integers(0, 99), min_size=2, max_size=2))
def test_more_headroom_never_means_more_rows(plant: tuple[int, int, float, int], headrooms: list[int]):
    """CF-011: the rows fall as the headroom rises, for any two headrooms."""
    less, more = sorted(headrooms)
    device = Device(*plant)
    if device.most(more):
        assert device.calibrated(more).rows <= device.calibrated(less).rows


def test_headrooms_of_0_20_and_50_give_ever_fewer_rows():
    """CF-011: 4 GiB of weights and 0.2 GiB a row on 80 GiB leave 380, 300 and 180 rows."""
    rows = [Device(4 * GIB, GIB // 5).calibrated(headroom_pct).rows for headroom_pct in (0, 20, 50)]
    assert rows == [380, 300, 180]


def test_a_forward_that_runs_out_of_memory_is_survived():
    """CF-007: sizes beyond the device are tried, fail, and are not chosen."""
    found = Device(10 * GIB, GIB, power=2.0).calibrated(0)
    assert found.rows == 8
    assert None in [reading.used_bytes for reading in found.readings]


def test_what_a_misfit_leaves_behind_counts():
    """On an H200, 298 rows fitted, 299 did not, and then 298 did not fit any more. What is chosen fits at last."""
    device = Device(0, 80 * GIB // 299)
    whole = device.needs

    def probe(rows: int) -> MemoryReading:
        reading = Device.probe(device, rows)
        if reading.used_bytes is None:
            device.needs = lambda number: whole(number) + 3 * GIB // 2
        return reading

    found = calibrate(probe, total_bytes=device.total_bytes, headroom_pct=0, ceiling=512)
    assert found.readings[-1].rows == found.rows
    assert found.rows == 293
    assert device.needs(found.rows) <= device.total_bytes


def test_a_line_spares_forwards_that_would_run_out_of_memory():
    """Where memory grows along a line, no forward is tried that needs more than one row too much."""
    found = Device(4 * GIB, GIB).calibrated(20)
    assert found.rows == 60
    assert max(reading.rows for reading in found.readings) == 61


@pytest.mark.parametrize("cliff", [257, 300, 400, 511])
def test_memory_that_leaps_is_not_approached_row_by_row(cliff: int):
    """From some size on a kernel wants a large workspace: no line leads there, and it is found all the same."""
    device = Device(0, 1)
    device.needs = lambda rows: GIB + rows if rows < cliff else 79 * GIB + rows
    assert device.calibrated(20).rows == cliff - 1
    assert device.forwards <= 3 * log2(512)


def test_memory_that_does_not_grow_says_nothing():
    """A model on a GPU's worker that computes on the CPU: every size fits, and that means nothing."""
    elsewhere, here = Device(GIB, 0).calibrated(20), Device(GIB, GIB).calibrated(20)
    assert (elsewhere.rows, elsewhere.says_something) == (512, False)
    assert here.says_something


def test_one_row_too_large_names_what_can_be_done():
    """A model that fills the device is refused with the settings that could help."""
    with pytest.raises(ConfigurationError, match="gpu_headroom_pct, or a max_batch_size"):
        Device(79 * GIB, GIB).calibrated(20)
