"""What one entry of the audit log takes: with a sync of its own, and in groups of 64 callers; beside a bare sync."""

from __future__ import annotations

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, NamedTuple

from penstock.safety.audit import GATE_DECISION, AuditConfig, AuditLogger
from tests.benchmarks.report import Progress, Row, median
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

_CALLERS: Final = 64
_GROUP_S: Final = 0.002
_DETAILS: Final = {"cosine_sim": 0.998, "max_diff": 0.0012, "rows": 64}


class _Cost(NamedTuple):
    """Microseconds per entry. sync_us: of a bare write and fsync of as many bytes."""

    synced_us: float
    grouped_us: float
    sync_us: float


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module. The contenders take turns."""
    entries = max(_CALLERS, scale.jobs // 20)
    rounds = [_Cost(_synced_us(entries), _grouped_us(entries), _bare_us(entries)) for _ in range(scale.rounds)]
    cost = _Cost(*map(median, zip(*rounds, strict=True)))
    say(f"audit: synced {cost.synced_us:.0f} us, grouped {cost.grouped_us:.0f} us, a bare sync {cost.sync_us:.0f} us")
    return [
        Row(
            f"audit log, per entry: each with its own sync / {_CALLERS} callers in groups of 2 ms",
            f"{cost.synced_us:.0f} / {cost.grouped_us:.0f} us",
            figures=cost._asdict(),
        ),
        Row("the bound: one write of 350 bytes and one fsync", f"{cost.sync_us:.0f} us"),
    ]


def _synced_us(entries: int) -> float:
    with tempfile.TemporaryDirectory() as folder, _log(folder, 0.0) as log:
        begun = time.perf_counter()
        for _ in range(entries):
            _append(log)
        return (time.perf_counter() - begun) / entries * 1e6


def _grouped_us(entries: int) -> float:
    with tempfile.TemporaryDirectory() as folder, _log(folder, _GROUP_S) as log, ThreadPoolExecutor(_CALLERS) as pool:
        begun = time.perf_counter()
        for each in [pool.submit(_append, log) for _ in range(entries)]:
            each.result()
        return (time.perf_counter() - begun) / entries * 1e6


def _bare_us(entries: int) -> float:
    with tempfile.TemporaryFile() as file:
        begun = time.perf_counter()
        for _ in range(entries):
            os.write(file.fileno(), b"x" * 350)
            os.fsync(file.fileno())
        return (time.perf_counter() - begun) / entries * 1e6


def _log(folder: str, group_s: float) -> AuditLogger:
    return AuditLogger(config=AuditConfig(Path(folder), os.urandom(32), group_s=group_s))


def _append(log: AuditLogger) -> None:
    log.log_event(GATE_DECISION, "mlp", "compiled", "PASS", _DETAILS)
