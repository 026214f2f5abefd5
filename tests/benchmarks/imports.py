"""Imports: what a program pays that submits jobs, or only imports the package."""

from __future__ import annotations

import subprocess
import sys
from typing import Final

from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import ROOT

__all__ = ["measure"]

_TRIES: Final = 5
_LIMITS_MS: Final = {"import penstock": 50, "from penstock import Client": 350}
"""CPU beyond that of Python itself."""


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    return [_row(statement, limit_ms, say) for statement, limit_ms in _LIMITS_MS.items()]


def _row(statement: str, limit_ms: int, say: Progress) -> Row:
    cpu_ms = median(_cpu_ms(statement) for _ in range(_TRIES))
    say(f"imports: {statement}: {cpu_ms:.0f} ms")
    return Row(
        f"CPU of `{statement}` in a fresh interpreter",
        f"{cpu_ms:.0f} ms",
        f"<= {limit_ms} ms",
        ok=verdict(required=cpu_ms <= limit_ms),
        figures={"cpu_ms": cpu_ms},
    )


def _cpu_ms(statement: str) -> float:
    program = f"import time; begun = time.process_time(); {statement}; print((time.process_time() - begun) * 1000)"
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
