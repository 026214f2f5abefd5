"""The facts and the pictures of the acts -> one HTML file that needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any, Final

from penstock.compose.terminal import counted

__all__ = ["page", "sentences"]

_STYLE: Final = """
body { font: 16px/1.5 system-ui, sans-serif; color: #2b2f36; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
img { width: 100%; border: 1px solid #e3e6ea; border-radius: 6px }
code, pre { background: #f4f5f7; border-radius: 4px; padding: .1rem .3rem }
pre { padding: .8rem; overflow-x: auto }
table { border-collapse: collapse } td, th { text-align: left; padding: .2rem .9rem .2rem 0; vertical-align: top }
"""
_NOTHING: Final = "No form was promoted, so none was broken."
_TITLES: Final = {
    "refused": "1. A wrong candidate is refused",
    "promoted": "2. A right and faster candidate",
    "broken": "3. The promoted form breaks",
}


def sentences(facts: Mapping[str, Any]) -> dict[str, list[str]]:
    """What each act has shown, in sentences with the measured figures."""
    tell = {"refused": _refused, "promoted": _promoted, "broken": _broken}
    return {act: tell[act](found) if found else [_NOTHING] for act, found in facts.items() if act in tell}


def page(facts: Mapping[str, Any], pictures: Mapping[str, Path]) -> str:
    """The report."""
    told = sentences(facts)
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><title>Penstock: the safety demo</title>"]
    parts += [f"<style>{_STYLE}</style><h1>Penstock: the safety demo</h1>", _machine(facts)]
    for act, title in _TITLES.items():
        parts.append(f"<h2>{escape(title)}</h2>")
        parts += [f"<p>{escape(sentence)}</p>" for sentence in told[act]]
        if act in pictures:
            data = base64.b64encode(pictures[act].read_bytes()).decode()
            parts.append(f'<img alt="{escape(title)}" src="data:image/png;base64,{data}">')
        parts.append(f"<pre>{escape(_commands(facts[act]))}</pre>" if facts[act] else "")
    parts.append(
        "<p>Every figure was measured in this run. The same figures are in <code>facts.json</code>.</p></html>"
    )
    return "\n".join(parts) + "\n"


def _machine(facts: Mapping[str, Any]) -> str:
    rows = {**facts["machine"], "run": f"{facts['seconds']:.0f} s"}
    cells = "".join(f"<tr><th>{escape(name)}<td>{escape(str(value))}" for name, value in rows.items())
    return f"<table>{cells}</table>"


def _commands(act: Mapping[str, Any]) -> str:
    ran = [each for each in (act, act.get("promotion"), act.get("asked_again")) if each and "command" in each]
    return "\n".join(f"$ {each['command']}\n  # {each['seconds']:g} s, exit status {each['exit_code']}" for each in ran)


def _refused(act: Mapping[str, Any]) -> list[str]:
    canary = act["canary"]
    return [
        "MiniLM serves in fp32. The candidate is the same version in int8, quantised without calibration.",
        f"The canary says {canary['verdict']} after {counted(canary['pairs'], 'pair')}"
        f"{': ' if canary['reasons'] else ''}{'; '.join(canary['reasons'])}.",
        _served(act["served"]),
    ]


def _promoted(act: Mapping[str, Any]) -> list[str]:
    canary = act["canary"]
    told = [
        "A small classifier of MiniLM embeddings, with random weights, serves as a torch module. The candidate is the "
        "same version as an ONNX graph.",
        f"The canary says {canary['verdict']} after {counted(canary['pairs'], 'pair')}"
        f"{': ' if canary['reasons'] else ''}{'; '.join(canary['reasons'])}.",
    ]
    if act["is_promoted"]:
        told.append(
            f"The gate measured {act['gain']:.2f} times the speed of the one in use: {act['in_use_ms']:.2f} ms against "
            f"{act['form_ms']:.2f} ms for the golden batches, in turns. The form serves from the next batch on."
        )
    else:
        told.append(f"The form is not promoted: {act['why_not']}. {act['form'] or 'The model as built'} serves.")
    return [*told, _served(act["served"])]


def _broken(act: Mapping[str, Any]) -> list[str]:
    breaker, end = act["breaker"], act["at_the_end"]
    right = "finite and right" if act["poison"]["is_right"] else "not right"
    return [
        "The graph has a fault of purpose: its softmax overflows for large inputs. Canary and gate saw usual ones.",
        f"At {act['poison']['at_s']:.1f} s a client sends an embedding that is 10,000 times too long. The form fails, "
        f"the model as its author built it answers the batch (level {act['poison']['level']}), and the answer is "
        f"{right}.",
        f"The circuit breaker opens: {breaker['reason']}.",
        f"It holds the form off for at least {breaker['pause_s']:.0f} s.",
        f"An operator asks for the form at once: {act['asked_again']['answer']}.",
        f"After {end['at_s'] - act['poison']['at_s']:.0f} s of usual inputs the breaker is {end['circuit']}, with "
        f"{end['left_s']:.0f} s left. It has opened {counted(end['times_opened'], 'time')}.",
        f"{_served(act['served'])} {_levels(act['levels'])}",
    ]


def _levels(levels: Mapping[str, int]) -> str:
    told = ", ".join(f"{count:,} {level or 'first level'}" for level, count in sorted(levels.items()))
    return f"By the level that answered: {told}."


def _served(served: Mapping[str, Any]) -> str:
    wrong = served["wrong_or_failed"]
    return f"Meanwhile {counted(served['jobs'], 'job')} were answered, {wrong} of them wrongly or not at all."
