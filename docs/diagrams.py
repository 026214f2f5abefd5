"""A diagram as text -> SVG: the sources are docs/pictures/*.txt.

    title  TEXT
    group  X Y WIDTH HEIGHT TEXT                 a frame with a heading
    box    NAME X Y WIDTH HEIGHT TEXT / TEXT     one or two lines
    arrow  NAME.SIDE[+SHIFT] NAME.SIDE[+SHIFT] [TEXT]
    dashed NAME.SIDE[+SHIFT] NAME.SIDE[+SHIFT] [TEXT]

A side is l, r, t or b; a shift moves the end along its side. Lines run straight, or with one or two right angles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from typing import Final, NamedTuple

__all__ = ["draw"]

_INK: Final = "#7a808a"
_LINE: Final = "#3f7cac"
_ROUND_THE_CORNER_PX: Final = 26
_MARGIN_PX: Final = 8
_LETTER_PX: Final = 6.5


class _Label(NamedTuple):
    x: float
    y: float
    text: str
    anchor: str


class _End(NamedTuple):
    x: float
    y: float
    side: str


@dataclass(frozen=True, slots=True)
class _Box:
    x: float
    y: float
    width: float
    height: float

    @property
    def svg(self) -> str:
        """Its place as attributes."""
        return f'x="{self.x:g}" y="{self.y:g}" width="{self.width:g}" height="{self.height:g}"'

    def end(self, side: str, shift: float) -> _End:
        """The point on one side from which a line starts."""
        middle_x, middle_y = self.x + self.width / 2 + shift, self.y + self.height / 2 + shift
        if side in "lr":
            return _End(self.x if side == "l" else self.x + self.width, middle_y, side)
        return _End(middle_x, self.y if side == "t" else self.y + self.height, side)


@dataclass(slots=True)
class _Drawing:
    title: str = ""
    right: float = 0
    bottom: float = 0
    boxes: dict[str, _Box] = field(default_factory=dict)
    shapes: list[str] = field(default_factory=list)

    def grow(self, x: float, y: float) -> None:
        """Makes the picture large enough for this point."""
        self.right, self.bottom = max(self.right, x), max(self.bottom, y)


def draw(source: str) -> str:
    """The SVG of a source. Raises ValueError for a line that is none of the five."""
    drawing = _Drawing()
    for line in source.splitlines():
        word, _, rest = line.strip().partition(" ")
        if not word or word == "#":
            continue
        if word not in _WORDS:
            raise ValueError(f"Unknown word {word!r} in a diagram. Expected one of: {', '.join(_WORDS)}")
        _WORDS[word](drawing, rest.strip())
    return "\n".join([*_head(drawing), *drawing.shapes, "</svg>\n"])


def _head(drawing: _Drawing) -> list[str]:
    width, height = drawing.right + 2 * _MARGIN_PX, drawing.bottom + 2 * _MARGIN_PX
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="-{_MARGIN_PX} -{_MARGIN_PX} {width:g} {height:g}" '
        f'width="{width:g}" font-family="sans-serif" font-size="12" fill="{_INK}" role="img">',
        f"<title>{escape(drawing.title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0L10 5L0 10z" fill="{_LINE}"/></marker></defs>',
    ]


def _title(drawing: _Drawing, text: str) -> None:
    drawing.title = text


def _group(drawing: _Drawing, rest: str) -> None:
    frame, text = _placed(rest)
    drawing.shapes += [
        f'<rect {frame.svg} rx="6" fill="none" stroke="{_INK}" stroke-opacity="0.5" stroke-dasharray="2 4"/>',
        _text(frame.x + frame.width / 2, frame.y + 18, text, "middle", bold=True),
    ]
    drawing.grow(frame.x + frame.width, frame.y + frame.height)


def _box(drawing: _Drawing, rest: str) -> None:
    name, _, rest = rest.partition(" ")
    box, text = _placed(rest)
    drawing.boxes[name] = box
    drawing.shapes.append(f'<rect {box.svg} rx="5" fill="{_LINE}" fill-opacity="0.1" stroke="{_LINE}"/>')
    lines = text.split(" / ")
    top = box.y + box.height / 2 + 4 - 7.5 * (len(lines) - 1)
    for number, line in enumerate(lines):
        drawing.shapes.append(_text(box.x + box.width / 2, top + 15 * number, line, "middle", bold=number == 0))
    drawing.grow(box.x + box.width, box.y + box.height)


def _arrow(drawing: _Drawing, rest: str, *, dashes: str = "") -> None:
    first, second, *words = rest.split(" ")
    start, end = (_end_of(drawing, each) for each in (first, second))
    points = _corners(start, end)
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    drawing.shapes.append(f'<path d="{path}" fill="none" stroke="{_LINE}"{dashes} marker-end="url(#tip)"/>')
    if words:
        label = _label(points, " ".join(words))
        drawing.shapes.append(_text(*label))
        drawing.grow(label.x + len(label.text) * _LETTER_PX, label.y)
    drawing.grow(max(x for x, _ in points), max(y for _, y in points))


def _dashed(drawing: _Drawing, rest: str) -> None:
    _arrow(drawing, rest, dashes=' stroke-dasharray="5 4"')


_WORDS: Final = {"title": _title, "group": _group, "box": _box, "arrow": _arrow, "dashed": _dashed}


def _end_of(drawing: _Drawing, text: str) -> _End:
    found = re.fullmatch(r"(\w+)\.([lrtb])([+-]\d+)?", text)
    if found is None:
        raise ValueError(f"{text!r} is no end of a line. Expected NAME.SIDE+SHIFT")
    return drawing.boxes[found[1]].end(found[2], float(found[3] or 0))


def _corners(start: _End, end: _End) -> list[tuple[float, float]]:
    """The points of a line: straight where the ends are level, else with right angles."""
    first, last = (start.x, start.y), (end.x, end.y)
    is_flat, ends_flat = start.side in "lr", end.side in "lr"
    if is_flat != ends_flat:
        return [first, (end.x, start.y) if is_flat else (start.x, end.y), last]
    if start.side == end.side:
        outside = max(start.x, end.x) + _ROUND_THE_CORNER_PX
        if start.side == "l":
            outside = min(start.x, end.x) - _ROUND_THE_CORNER_PX
        return [first, (outside, start.y), (outside, end.y), last]
    if (is_flat and start.y == end.y) or (not is_flat and start.x == end.x):
        return [first, last]
    if is_flat:
        middle = (start.x + end.x) / 2
        return [first, (middle, start.y), (middle, end.y), last]
    middle = (start.y + end.y) / 2
    return [first, (start.x, middle), (end.x, middle), last]


def _label(points: list[tuple[float, float]], text: str) -> _Label:
    """Beside the last upright piece of a line, where it ends; or above the longest level one."""
    pieces = list(pairwise(points))
    upright = [(x, y, to) for (x, y), (same, to) in pieces if x == same]
    if upright:
        x, y, to = upright[-1]
        return _Label(x + 5, to - 20 if to > y else (y + to) / 2 + 4, text, "start")
    (x, y), (to, _) = max(pieces, key=lambda piece: abs(piece[0][0] - piece[1][0]))
    return _Label((x + to) / 2, y - 5, text, "middle")


def _placed(rest: str) -> tuple[_Box, str]:
    """`X Y WIDTH HEIGHT TEXT`."""
    x, y, width, height, text = rest.split(" ", 4)
    return _Box(float(x), float(y), float(width), float(height)), text


def _text(x: float, y: float, text: str, anchor: str = "start", *, bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
