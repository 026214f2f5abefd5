"""The texts on a terminal, and where the output is none."""

from __future__ import annotations

import re
from io import StringIO

import pytest
from rich.console import Console

from penstock.compose.generate_demo.live import LiveTexts

PROMPTS = ["def one(", "def two("]


def test_lines_are_printed_as_soon_as_they_are_complete():
    """With the number of their text; the rest comes at the end."""
    output = StringIO()
    with LiveTexts(Console(file=output, width=60), PROMPTS) as live:
        live.add(0, "a")
        live.add(1, "b):\n")
        assert output.getvalue() == "2 | def two(b):\n"
        live.add(0, "):\n\n    x\n    y")
        assert output.getvalue().splitlines()[1:] == ["1 | def one(a):", "1 | ", "1 |     x"]
        live.add(1, "    [bold]")
    assert output.getvalue().splitlines()[4:] == ["1 |     y", "2 |     [bold]"]
    assert live.texts == ["def one(a):\n\n    x\n    y", "def two(b):\n    [bold]"]


def test_a_text_that_got_nothing_shows_its_prompt():
    """And a line without an end is longer than the screen is wide, as one line."""
    output = StringIO()
    with LiveTexts(Console(file=output, width=20), PROMPTS) as live:
        live.add(1, "x" * 50 + "\n")
    assert output.getvalue().splitlines() == [f"2 | def two({'x' * 50}", "1 | def one("]


@pytest.mark.parametrize(("width", "height", "texts"), [(80, 24, 8), (40, 16, 8), (120, 50, 1), (79, 24, 5)])
def test_the_panels_fit_the_screen(width: int, height: int, texts: int):
    """Each text has a panel with its last words, and no line is longer than the terminal is wide."""
    console = Console(file=StringIO(), force_terminal=True, color_system=None, width=width, height=height)
    live = LiveTexts(console, [f"def text_{number}(" for number in range(texts)])
    for number in range(texts):
        live.texts[number] += "word " * 200 + f"\nlast {number}"
    with console.capture() as captured:
        console.print(live._draw())
    lines = captured.get().splitlines()
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    assert re.findall(r"last \d", captured.get()) == [f"last {number}" for number in range(texts)]


def test_a_terminal_keeps_the_whole_texts():
    """After the panels, each from its prompt to its end, once."""
    output = StringIO()
    console = Console(file=output, force_terminal=True, color_system=None, width=80, height=12)
    with LiveTexts(console, PROMPTS) as live:
        for number in range(2):
            live.add(number, "):\n\n" + "\n".join(f"    line {line}" for line in range(30)) + "\n\n")
    shown = output.getvalue().rpartition("\x1b[2K")[2]
    assert [line for line in shown.splitlines() if "| def" in line] == ["1 | def one():", "2 | def two():"]
    assert shown.count("line 29") == 2
    assert [line.rstrip() for line in shown.splitlines()][-32:-29] == ["2 | def two():", "2 |", "2 |     line 0"]
