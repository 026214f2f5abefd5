"""Which pages the queries of a group of rows read under a rule. Pure: numbers only, so no look at a device is needed.

pages of each row, its first position -> without those before the first visible key -> filled up with page 0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from penstock.workers.generation.layer_rules import LayerRule

__all__ = ["PageTable", "page_table"]


class PageTable(NamedTuple):
    """numbers: (B * P), row by row. starts: (B), the position of the first key in each row's first page.

    length: keys that are read of each row. is_masked: whether any query does not see all of them.
    """

    numbers: list[int]
    starts: list[int]
    length: int
    is_masked: bool


def page_table(
    pages: Sequence[Sequence[int]],
    first_positions: Sequence[int],
    num_queries: int,
    rule: LayerRule,
    page_size: int,
) -> PageTable:
    """pages: of each row from position 0 on, as far as its last query. first_positions: of each row's first query."""
    numbers: list[int] = []
    if rule.reach is None:
        width, tables = max(map(len, pages)), pages
        starts = [0] * len(pages)
    else:
        firsts = [rule.first_visible(position) // page_size for position in first_positions]
        tables = [row[first:] for row, first in zip(pages, firsts, strict=True)]
        width = max(map(len, tables))
        starts = [first * page_size for first in firsts]
    for table in tables:
        numbers += table
        numbers += [0] * (width - len(table))
    reaches = [position - start for position, start in zip(first_positions, starts, strict=True)]
    # All rows at one length that fills its pages is rare, so the last positions are cut where no row has them.
    length = max(reaches) + num_queries
    is_masked = length - 1 > min(reaches) or (
        rule.reach is not None and _hides(rule, first_positions, num_queries, starts)
    )
    return PageTable(numbers, starts, length, is_masked)


def _hides(rule: LayerRule, first_positions: Sequence[int], num_queries: int, starts: Sequence[int]) -> bool:
    """Whether the last query of a row does not see the first key that is read."""
    lasts = (position + num_queries - 1 for position in first_positions)
    return any(rule.first_visible(last) > start for last, start in zip(lasts, starts, strict=True))
