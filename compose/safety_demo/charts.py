"""The facts of the acts -> pictures as PNG, by matplotlib (extra `demo-safety`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.registry.errors import ConfigurationError
from penstock.workers.runtime.forms import EAGER

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["check_matplotlib", "draw_charts"]

_SIZE: Final = (9.0, 4.2)
_DPI: Final = 130
_INK: Final = "#2b2f36"
_BLUE, _ORANGE, _RED, _GREEN, _GREY = "#3f7cac", "#d08c3c", "#b6403a", "#4f8f5b", "#8a919c"


def check_matplotlib() -> None:
    """Raises ConfigurationError where it is not installed: the demo needs it after minutes only."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise ConfigurationError("matplotlib is not installed. Expected: pip install '.[demo-safety]'") from None


def draw_charts(facts: Mapping[str, Any], folder: Path) -> dict[str, Path]:
    """Draws a picture for each act that ran; returns the files by the name of the act."""
    drawn = {"refused": _refused, "promoted": _promoted, "broken": _broken}
    return {name: _saved(draw(facts[name]), folder / f"{name}.png") for name, draw in drawn.items() if facts[name]}


def _refused(act: Mapping[str, Any]) -> Figure:
    """The cosine of each compared pair, from the worst to the best, beside the limit."""
    figure, axes = _axes("Act 1: MiniLM in int8 without calibration is refused")
    cosines = sorted(act["cosines"])
    limit = act["canary"]["figures"]["embedding.min_cosine"]["limit"]
    colours = [_RED if value < limit else _GREEN for value in cosines]
    axes.scatter(range(1, len(cosines) + 1), cosines, s=16, c=colours, zorder=3)
    axes.axhline(limit, color=_INK, linewidth=1.2)
    below = sum(value < limit for value in cosines)
    axes.annotate(f"limit: cosine {limit:g}", (1, limit), (0, 6), textcoords="offset points")
    axes.set_xlabel(f"compared pairs, the worst first ({below} of {len(cosines)} below the limit)")
    axes.set_ylabel("cosine of int8 and the served embedding")
    room = max(limit - cosines[0], 1e-4)
    axes.set_ylim(cosines[0] - 0.08 * room, 1 + 0.15 * room)
    return figure


def _promoted(act: Mapping[str, Any]) -> Figure:
    """The change of each pair beside the limit, and the time of both forms."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=_SIZE, width_ratios=(2, 1), layout="constrained")
    verdict, pairs = act["canary"]["verdict"], act["canary"]["pairs"]
    ended = "and is promoted" if act["is_promoted"] else "and is not promoted"
    figure.suptitle(f"Act 2: the ONNX form passes on {pairs:,} pairs ({verdict}) {ended}", x=0.01, ha="left")
    changes = [max(value, 1e-9) for value in act["changes"][:pairs]]
    limit = act["canary"]["figures"]["topics.max_delta"]["limit"]
    left.scatter(range(1, len(changes) + 1), changes, s=4, color=_BLUE, alpha=0.6, linewidths=0, zorder=3)
    left.axhline(limit, color=_INK, linewidth=1.2)
    left.annotate(f"limit {limit:g}", (len(changes), limit), (0, -12), textcoords="offset points", ha="right")
    left.set_yscale("log")
    left.set_xlabel("compared pair")
    left.set_ylabel("largest change of a probability")
    _tidy(left)
    times = [act["in_use_ms"], act["form_ms"]]
    if None in times:
        right.text(0.5, 0.5, "no time was measured", ha="center", transform=right.transAxes)
        right.set_axis_off()
    else:
        bars = right.bar(["as built", "ONNX"], times, color=[_GREY, _ORANGE], width=0.6, zorder=3)
        right.bar_label(bars, fmt="%.2f ms", padding=3)
        right.set_ylim(0, 1.18 * max(times))
        right.set_ylabel("ms for the golden batches, median")
        right.set_title(f"gain {act['gain']:.2f}, needed 1.1", fontsize=10)
        _tidy(right)
    return figure


def _broken(act: Mapping[str, Any]) -> Figure:
    """The latency of each job over time, behind it the form in use, and the moments of poison and breaker."""
    figure, axes = _axes("Act 3: the form breaks; the fallback answers, the breaker holds the form off")
    times, latencies, levels = zip(*act["latencies"], strict=True)
    colours = [_ORANGE if level else _BLUE for level in levels]
    end = act["at_the_end"]["at_s"]
    for begin, until, form in _spans(act["forms"], end):
        axes.axvspan(
            begin,
            until,
            color=_GREY if form == EAGER else _BLUE if form == act["form"] else _GREEN,
            alpha=0.14,
            linewidth=0,
        )
    axes.scatter(times, latencies, s=7, c=colours, alpha=0.7, linewidths=0, zorder=3)
    axes.set_yscale("log")
    poison, breaker = act["poison"]["at_s"], act["breaker"]
    axes.axvline(poison, color=_RED, linewidth=1.4, zorder=4)
    top = axes.get_ylim()[1]
    axes.set_ylim(top=top * 6)
    opened = f"breaker seen open at {breaker['seen_open_at_s']:.1f} s"
    told = f"poisoned job at {poison:.1f} s: answered by the fallback\n{opened}"
    axes.annotate(told, (poison, top * 4.6), (6, 0), textcoords="offset points", va="top", color=_RED)
    left = act["at_the_end"]["left_s"]
    axes.annotate(
        f"{left:.0f} s of {breaker['pause_s']:.0f} s off are left",
        (end, top * 1.2),
        ha="right",
        va="bottom",
        color=_INK,
    )
    axes.set_xlim(0, end)
    axes.set_xlabel("seconds")
    axes.set_ylabel("ms from submission to answer")
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    legend = [
        Patch(color=_BLUE, alpha=0.3, label=f"{act['form']} in use, as reported"),
        Patch(color=_GREY, alpha=0.3, label="as built"),
        Line2D([], [], color=_BLUE, marker="o", linestyle="", markersize=4, label="job answered by the first level"),
        Line2D([], [], color=_ORANGE, marker="o", linestyle="", markersize=4, label="by a level of the fallback chain"),
    ]
    figure.legend(handles=legend, loc="outside lower center", frameon=False, ncols=4, fontsize=9)
    return figure


def _spans(forms: list[tuple[float, str]], end: float) -> list[tuple[float, float, str]]:
    """The samples of the form in use -> (begin, end, form) of each stretch."""
    spans: list[tuple[float, float, str]] = []
    for at, form in forms:
        if not spans:
            spans.append((0.0, end, form))
        elif spans[-1][2] != form:
            spans[-1] = (spans[-1][0], at, spans[-1][2])
            spans.append((at, end, form))
    return spans


def _axes(title: str) -> tuple[Figure, Axes]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    figure.suptitle(title, x=0.01, ha="left")
    _tidy(axes)
    return figure, axes


def _tidy(axes: Axes) -> None:
    axes.grid(axis="y", color="#e3e6ea", linewidth=0.8, zorder=0)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _saved(figure: Figure, file: Path) -> Path:
    from matplotlib import pyplot

    figure.savefig(file, dpi=_DPI)
    pyplot.close(figure)
    return file
