"""`max_batch_size = 0` on a GPU: forwards of rising size -> the most rows that leave the headroom free. Pure decisions;
the forwards, and the readings of device memory, come in as `probe` (workers/versions/device_memory.py).

    1, 2, 4, ... rows, until a line through the last readings, or a reading itself, says where the limit lies
      --> forwards around there, until the most rows that fit are known

The chosen number of rows was run: its reading is within the limit, and one row more is beyond the limit or the ceiling.
After a forward that did not fit, it was run once more, and rows were left out until it fitted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.registry.errors import ConfigurationError

__all__ = ["Calibration", "MemoryReading", "calibrate"]

_STEPS_DOWN = 100


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """Bytes in use on the device, by all processes, at the peak of a forward with these rows; None: it did not fit."""

    rows: int
    used_bytes: int | None


@dataclass(frozen=True, slots=True)
class Calibration:
    """The most rows of a batch, and the readings in order."""

    rows: int
    limit_bytes: int
    readings: tuple[MemoryReading, ...]

    @property
    def says_something(self) -> bool:
        """Whether memory grew with the rows. It does not for a model that runs on another device."""
        return len({reading.used_bytes for reading in self.readings}) > 1


def calibrate(
    probe: Callable[[int], MemoryReading], *, total_bytes: int, headroom_pct: int, ceiling: int
) -> Calibration:
    """The most rows, up to `ceiling`, whose forward leaves `headroom_pct` percent of the device's memory free.

    probe: runs a forward with the given rows; more rows never need less memory.
    Raises ConfigurationError when even one row leaves less.
    """
    limit_bytes = total_bytes * (100 - headroom_pct) // 100
    readings: list[MemoryReading] = []
    fitting, beyond = 0, ceiling + 1
    while fitting + 1 < beyond:
        is_doubling = beyond > ceiling
        highest = min(max(1, 2 * fitting), ceiling) if is_doubling else beyond - 1
        rows = _next_size(readings, limit_bytes, fitting + 1, highest, by_line=is_doubling or len(readings) % 2 == 0)
        readings.append(probe(rows))
        if _fits(readings[-1], limit_bytes):
            fitting = rows
        else:
            beyond = rows
    # A forward that did not fit may leave less than it found, so what is chosen is run once more behind it.
    while fitting and readings[-1].rows != fitting and any(reading.used_bytes is None for reading in readings):
        readings.append(probe(fitting))
        if not _fits(readings[-1], limit_bytes):
            fitting -= max(1, fitting // _STEPS_DOWN)
    if not fitting:
        raise ConfigurationError(
            f"One row does not leave {headroom_pct} % of the device's memory free. "
            "Expected a smaller model, a lower gpu_headroom_pct, or a max_batch_size"
        )
    return Calibration(fitting, limit_bytes, tuple(readings))


def _fits(reading: MemoryReading, limit_bytes: int) -> bool:
    return reading.used_bytes is not None and reading.used_bytes <= limit_bytes


def _next_size(readings: Sequence[MemoryReading], limit_bytes: int, lowest: int, highest: int, *, by_line: bool) -> int:
    """A number of rows between these two: where the line meets the limit or, on every other try, the middle.

    With the line alone, memory that does not grow along a line would be approached row by row.
    """
    if by_line:
        return min(highest, max(lowest, _crossing(readings, limit_bytes, highest)))
    return (lowest + highest) // 2


def _crossing(readings: Sequence[MemoryReading], limit_bytes: int, highest: int) -> int:
    """Where the line through the two readings nearest to the limit meets it; `highest` where there is no such line."""
    known = [(abs(used - limit_bytes), reading.rows, used) for reading in readings if (used := reading.used_bytes)]
    if len(known) < 2:
        return highest
    (_, rows, used), (_, other_rows, other_used) = sorted(known)[:2]
    bytes_per_row = (used - other_used) / (rows - other_rows)
    return highest if bytes_per_row <= 0 else int(rows + (limit_bytes - used) / bytes_per_row)
