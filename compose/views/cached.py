"""The cache of every worker, from the workers' reports: its tiers, and what went wrong in them."""

from __future__ import annotations

from typing import Any, Final

from rich.console import RenderableType
from rich.table import Table

from penstock.compose.views.overview import workers
from penstock.registry.broker.base import FleetEnd

__all__ = ["caches", "draw_caches"]

_TIERS: Final = {"l1": "memory", "l2": "disk", "l3": "Redis"}
_MIB: Final = 1 << 20


def caches(broker: FleetEnd) -> list[dict[str, Any]]:
    """One entry per live worker: its name, and the counters of each tier. Raises BrokerUnavailable."""
    return [{"worker": report["name"], "cache": report.get("cache", {})} for report in workers(broker)]


def draw_caches(found: list[dict[str, Any]]) -> RenderableType:
    """A row per worker and tier."""
    table = Table("worker", "tier", "entries", "MiB", "hits", "misses", "evicted", "refused", "errors")
    for column in table.columns[2:]:
        column.justify = "right"
    for each in found:
        for tier, where in _TIERS.items():
            if (stats := each["cache"].get(tier)) is not None:
                table.add_row(each["worker"], f"{tier} {where}", *_cells(stats))
    return table


def _cells(stats: dict[str, int]) -> list[str]:
    is_size_known = stats.get("is_size_known", True)
    size = [f"{stats['entries']:,}", f"{stats['nbytes'] / _MIB:,.1f}"] if is_size_known else ["", ""]
    counts = [
        None if name == "evicted" and not is_size_known else stats.get(name)
        for name in ("hits", "misses", "evicted", "refused", "errors")
    ]
    shown = ["" if count is None else f"{count:,}" for count in counts]
    return [*size, *shown]
