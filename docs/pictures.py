"""The pictures of the documents: charts of the tables in docs/benchmarks.md, diagrams of docs/pictures/*.txt.

    python docs/pictures.py    writes docs/pictures/*.svg anew

A chart shows figures of the page only, so that both change together. The colours are readable on light and dark pages.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from diagrams import draw

__all__ = ["Bar", "chart", "main", "pictures"]

_DOCS: Final = Path(__file__).parent
_ROW_PX: Final = 22
_LABEL_PX: Final = 290
_BARS_PX: Final = 330
_WIDTH_PX: Final = 720
_COLOURS: Final = ("#3f7cac", "#d08c3c")
_INK: Final = "#7a808a"


class Bar(NamedTuple):
    """One line of a chart: its parts are drawn one behind the other, and `text` stands at their end."""

    label: str
    parts: Sequence[float]
    text: str


def chart(title: str, bars: Sequence[Bar], legend: Sequence[str] = ()) -> str:
    """An SVG with one horizontal bar per line."""
    top = 34 + (_ROW_PX if legend else 0)
    scale = _BARS_PX / max(sum(bar.parts) for bar in bars)
    lines = [_text(0, 18, title, weight="bold"), *_legend(legend)]
    for number, bar in enumerate(bars):
        y, x = top + number * _ROW_PX, float(_LABEL_PX)
        lines.append(_text(_LABEL_PX - 8, y + 14, bar.label, anchor="end"))
        for colour, value in zip(_COLOURS, bar.parts, strict=False):
            lines.append(_box(x, y + 3, value * scale, colour))
            x += value * scale
        lines.append(_text(x + 6, y + 14, bar.text))
    height = top + len(bars) * _ROW_PX + 6
    frame = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH_PX} {height}" width="{_WIDTH_PX}"'
    style = f'font-family="sans-serif" font-size="13" fill="{_INK}" role="img"'
    return "\n".join([f"{frame} {style}>", f"<title>{escape(title)}</title>", *lines, "</svg>", ""])


def _legend(names: Sequence[str]) -> list[str]:
    lines = []
    for number, (name, colour) in enumerate(zip(names, _COLOURS, strict=False)):
        x = _LABEL_PX + number * 230
        lines += [_box(x, 30, 12, colour), _text(x + 18, 41, name)]
    return lines


def _box(x: float, y: float, width: float, colour: str) -> str:
    return f'<rect x="{x:.1f}" y="{y:.0f}" width="{max(width, 1):.1f}" height="14" rx="2" fill="{colour}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.0f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'


def pictures() -> dict[str, str]:
    """File name -> SVG."""
    rows = _rows((_DOCS / "benchmarks.md").read_text())
    diagrams = {f"{source.stem}.svg": draw(source.read_text()) for source in (_DOCS / "pictures").glob("*.txt")}
    return diagrams | {
        "cpu-per-job.svg": _cpu_by_stage(rows),
        "latency.svg": _latency(rows),
        "peers.svg": _peers(rows),
    }


def _rows(text: str) -> dict[str, list[str]]:
    """The lines of all tables: first cell -> the other cells."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return {cells[0]: cells[1:] for cells in lines}


def _numbers(text: str) -> list[float]:
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", text)]


def _row(rows: dict[str, list[str]], start: str) -> list[str]:
    return next(cells for label, cells in rows.items() if label.startswith(start))


def _cpu_by_stage(rows: dict[str, list[str]]) -> str:
    labels = list(rows)
    first, last = labels.index("open: verify, decode, check"), labels.index("the whole process while the jobs ran")
    bars = [Bar(label, [float(rows[label][0])], rows[label][0]) for label in labels[first:last]]
    return chart(f"Worker CPU per job by stage, us ({rows[labels[last]][0]} in total, 64 in flight)", bars)


def _latency(rows: dict[str, list[str]]) -> str:
    bare = _numbers(_row(rows, "bound: XADD")[0])[0]
    medians = {
        name: _numbers(_row(rows, f"one job at a time, idle system, {name},")[2])[0]
        for name in ("Client", "AsyncClient")
    }
    bars = [Bar(name, [bare, job - bare], f"{job:.2f} ms") for name, job in medians.items()]
    return chart("One job on an idle system, median latency", bars, ("four bare Redis commands", "Penstock's part"))


def _peers(rows: dict[str, list[str]]) -> str:
    worker, _, redis = _numbers(_row(rows, "plain Celery task per job, prefork, one process, 64")[0].partition(";")[2])
    named = {
        name: _numbers(_row(rows, start)[0].partition("broker")[2])[0]
        for name, start in (
            ("LitServe", "peer: LitServe"),
            ("mosec, JSON", "peer: mosec, 64"),
            ("mosec, msgpack", "peer: mosec, msgpack"),
            ("Penstock", "Penstock, AsyncClient, 64"),
        )
    }
    bars = [Bar(name, [us], f"{us:,.0f}") for name, us in ({"one plain Celery task": worker + redis} | named).items()]
    return chart("CPU per job of server and broker, us, 64 in flight", bars)


def main() -> None:
    """Writes the pictures."""
    for name, svg in pictures().items():
        (_DOCS / "pictures" / name).write_text(svg)


if __name__ == "__main__":
    main()
