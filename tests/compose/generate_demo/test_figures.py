"""The closing table: what each figure is made from."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from penstock.compose.generate_demo.figures import EngineCounts, TextRun, draw, figures_of

COUNTS = EngineCounts(steps=10, rows=35, prefix_found=160, prefix_queried=200, pages_peak=40, pages=244)


def test_figures_are_those_of_the_chunks():
    """Tokens of one chunk share its time; the rate is over the whole span of all texts."""
    alone = TextRun(0.0, [(0.5, 1), (1.5, 3)])
    runs = [TextRun(10.0, [(10.2, 1), (10.6, 4), (11.0, 1)]), TextRun(10.1, [(10.2, 2)])]
    assert runs[0].inter_token_s == pytest.approx([0.1, 0.1, 0.1, 0.1, 0.4])
    found = figures_of(alone, runs, COUNTS)
    assert (found.texts, found.tokens, found.seconds, found.tokens_per_s) == (2, 8, 1.0, 8.0)
    assert found.alone_tokens_per_s == round(4 / 1.5, 1)
    assert found.first_token_p50_ms == 150.0
    assert (found.inter_token_p50_ms, found.rows_per_step) == (100.0, 3.5)
    assert found.inter_token_p99_ms == pytest.approx(388.0)


def test_counts_are_those_of_the_interval():
    """The most pages are since the load."""
    before = {"steps": 5, "rows": 5, "prefix_found": 0, "prefix_queried": 90, "pages_peak": 8, "pages": 244}
    after = {"steps": 15, "rows": 40, "prefix_found": 160, "prefix_queried": 290, "pages_peak": 40, "pages": 244}
    assert EngineCounts.between(before, after) == COUNTS


def test_table_has_every_figure():
    """A row for each, with its unit."""
    found = figures_of(TextRun(0.0, [(0.5, 1)]), [TextRun(0.0, [(0.5, 1), (0.6, 2)])], COUNTS)
    output = StringIO()
    Console(file=output, width=160).print(draw(found))
    rows = output.getvalue().splitlines()[1:]
    assert [row.split("  ")[0] for row in rows] == [
        "tokens/s",
        "tokens/s, one text alone",
        "time to first token, p50",
        "inter-token, p50",
        "inter-token, p99",
        "batch",
        "prefix-cache hits",
        "pages used",
    ]
    assert "3.5 rows" in rows[5]
    assert "160 tokens" in rows[6]
    assert "200" in rows[6]
