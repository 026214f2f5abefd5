"""Which pages a group of rows reads: compared with each query and each key, one by one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.workers.generation.layer_rules import LayerRule
from penstock.workers.generation.page_tables import page_table

RULES = st.one_of(
    st.just(LayerRule()),
    st.integers(1, 20).map(lambda window: LayerRule(window=window)),
    st.integers(1, 20).map(lambda chunk: LayerRule(chunk=chunk)),
)


def sees(rule: LayerRule, query: int, key: int) -> bool:
    """Whether the query at a position sees the key at a position."""
    if key > query:
        return False
    if rule.window is not None:
        return key > query - rule.window
    return rule.chunk is None or key // rule.chunk == query // rule.chunk


@given(
    rule=RULES,
    page_size=st.integers(1, 8),
    queries=st.integers(1, 6),
    firsts=st.lists(st.integers(0, 40), min_size=1, max_size=4),
)
def test_tables_hold_every_visible_key(rule, page_size, queries, firsts):
    """Each key that a query sees is in its row's table, and the mask is left out where each query sees all keys."""
    pages = [
        [100 * row + page for page in range(-(-(first + queries) // page_size))] for row, first in enumerate(firsts)
    ]
    found = page_table(pages, firsts, queries, rule, page_size)
    width = len(found.numbers) // len(firsts)
    sees_all = True
    for row, first in enumerate(firsts):
        own = found.numbers[row * width : (row + 1) * width]
        for query in range(first, first + queries):
            keys = range(found.starts[row], found.starts[row] + found.length)
            seen = [key for key in range(first + queries) if sees(rule, query, key)]
            assert set(seen) <= set(keys)
            assert [own[(key - keys.start) // page_size] for key in seen] == [
                pages[row][key // page_size] for key in seen
            ]
            sees_all &= len(seen) == len(keys)
    assert found.is_masked != sees_all
