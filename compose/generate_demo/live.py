"""Texts on the terminal as they are written: panels that are drawn again, or lines where the output is no terminal.

(number of the text, what is new) -> LiveTexts -> a terminal: a panel for each text, with its last lines
                                              '-> elsewhere: each line as soon as it is complete, with its number
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Final

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

__all__ = ["LiveTexts"]

_DRAWS_PER_S: Final = 12
_COLUMNS: Final = 2
_BORDER: Final = 4
"""Characters of a panel's width that hold no text."""
_LEAST_LINES: Final = 3
_LINES_AROUND: Final = 1


class LiveTexts:
    """The texts of some prompts, for the length of the `with` block. A terminal shows the whole texts at its end."""

    def __init__(self, console: Console, prompts: Sequence[str]) -> None:
        self.texts: Final = list(prompts)
        """With the prompts that they continue."""
        self._lengths: Final = [len(prompt) for prompt in prompts]
        self._console: Final = console
        self._printed: Final = [0 for _ in prompts]
        """Characters of each text that stand in lines already."""
        self._live: Final = Live(
            console=console, get_renderable=self._draw, refresh_per_second=_DRAWS_PER_S, transient=True
        )

    def __enter__(self) -> LiveTexts:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()
        for number in range(len(self.texts)):
            self._print(number, len(self.texts[number].rstrip()))

    def add(self, number: int, new: str) -> None:
        """More of one text."""
        self.texts[number] += new
        if not self._console.is_terminal:
            self._print(number, self.texts[number].rfind("\n") + 1)

    def _print(self, number: int, end: int) -> None:
        """Prints the lines of a text up to there. A terminal gets its beginning in bold."""
        begin, self._printed[number] = self._printed[number], max(end, self._printed[number])
        if begin >= end:
            return
        shown = self._styled(number)[begin:end]
        for line in shown.split("\n"):
            self._console.print(Text.assemble((f"{number + 1} | ", "dim"), line), soft_wrap=True)

    def _styled(self, number: int) -> Text:
        text = Text(self.texts[number])
        text.stylize("bold", 0, self._lengths[number])
        return text

    def _draw(self) -> RenderableType:
        """A panel for each text, two beside each other, as high as the screen allows."""
        rows = -(-len(self.texts) // _COLUMNS)
        height = max(_LEAST_LINES, (self._console.height - _LINES_AROUND) // rows)
        width = self._console.width // _COLUMNS
        table = Table.grid(expand=True)
        for _ in range(_COLUMNS):
            table.add_column(ratio=1)
        panels = [self._panel(number, width, height) for number in range(len(self.texts))]
        for first in range(0, len(panels), _COLUMNS):
            table.add_row(*panels[first : first + _COLUMNS])
        return table

    def _panel(self, number: int, width: int, height: int) -> Panel:
        lines = self._styled(number).wrap(self._console, max(1, width - _BORDER), overflow="fold")
        return Panel(Text("\n").join(lines[-(height - 2) :]), title=str(number + 1), height=height)
