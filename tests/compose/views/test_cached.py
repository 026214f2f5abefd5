"""The view of the caches of all workers."""

from __future__ import annotations

from dataclasses import asdict
from io import StringIO

from rich.console import Console

from penstock.compose.views.cached import draw_caches
from penstock.workers.cache import L3Cache
from penstock.workers.cache.tier import TierStats


def test_a_size_that_is_not_known_is_no_zero():
    """Redis does not tell how many entries it has under one prefix."""
    disk = asdict(TierStats(hits=5, misses=6, entries=7, evicted=8))
    redis = {**asdict(L3Cache().stats), "hits": 9}
    console = Console(file=StringIO(), width=200)
    console.print(draw_caches([{"worker": "cpu0@host", "cache": {"l2": disk, "l3": redis}}]))
    assert isinstance(console.file, StringIO)
    rows = [line.split("│") for line in console.file.getvalue().splitlines() if "cpu0@host" in line]
    assert [[cell.strip() for cell in row[3:-1]] for row in rows] == [
        ["7", "0.0", "5", "6", "8", "0", "0"],
        ["", "", "9", "0", "", "0", "0"],
    ]
