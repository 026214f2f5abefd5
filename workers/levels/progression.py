"""What was profiled -> which step a model may take next. Pure: a table of criteria, and the state that decisions make.

    level 0   profile only
    level 1   tokenizer-cache, tokenizer-pool     exact: an id is an id
    level 2   batching (2a), compiled (2b)        the same numbers, within the tolerance
    level 3   onnx, bf16, fp16, compiled-bf16, int8    other arithmetic, through the validator of its precision

A step is tried when its criterion holds, and taken when its trial passed. A form that takes long to build is not tried
at all while the one in use is faster than it was ever found to be. Every decision is an event, and the state is nothing
but the events applied in order: replaying the log gives the state that was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final, Literal

from penstock.workers.runtime.forms import EAGER

__all__ = [
    "BATCHING",
    "COMPILED",
    "HIGHEST_LEVEL",
    "MIN_GAIN",
    "THRESHOLDS",
    "TOKENIZER_CACHE",
    "TOKENIZER_POOL",
    "Action",
    "Decision",
    "Evidence",
    "Readiness",
    "LevelState",
    "Threshold",
    "is_form",
    "readiness",
    "replay",
]

Action = Literal["enabled", "disabled", "refused"]

HIGHEST_LEVEL: Final = 3
"""Level 4 is read as this."""
MIN_GAIN: Final = 1.1
"""A form must be so much faster than the one in use: less is noise, and costs memory."""
TOKENIZER_CACHE: Final = "tokenizer-cache"
TOKENIZER_POOL: Final = "tokenizer-pool"
BATCHING: Final = "batching"
COMPILED: Final = "compiled"

_SOME_FORWARDS: Final = 20
_SOME_GOLDEN_ROWS: Final = 16
_QUICK_BUILD_S: Final = 2.0
"""A cast of the weights takes less than a second of a core."""
_LONG_BUILD_S: Final = 60.0
"""Compiling and exporting take some 20 s of a core: worth it for a model that has run three times as long."""
_MOST_ONNX_GAIN: Final = 2.0
_MOST_INT8_GAIN: Final = 4.0
"""Of models whose time goes into arithmetic, on one CPU thread: MiniLM gained 1.8 by ONNX and 3.5 by int8. A small MLP,
whose time goes into the framework, gained 2.8 and 7.9 by them, and nothing by a form that they are held against."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """What must have been seen before a step is tried. `min_forward_s`: seconds of forwards, for each long build.

    most_gain: how many times faster than the model as built the form was found to be at the most, of models that gain
    by others as well.
    """

    level: int
    min_forwards: int = 0
    min_texts: int = 0
    min_golden_rows: int = 0
    min_forward_s: float = 0.0
    min_warmed_rows: int = 0
    most_gain: float = inf


_QUICK: Final = Threshold(3, _SOME_FORWARDS, 0, _SOME_GOLDEN_ROWS, _QUICK_BUILD_S)
_LONG: Final = Threshold(3, _SOME_FORWARDS, 0, _SOME_GOLDEN_ROWS, _LONG_BUILD_S)

THRESHOLDS: Final[Mapping[str, Threshold]] = {
    TOKENIZER_CACHE: Threshold(1, min_texts=32),
    TOKENIZER_POOL: Threshold(1, min_texts=256, min_golden_rows=_SOME_GOLDEN_ROWS),
    BATCHING: Threshold(2, min_warmed_rows=2),
    COMPILED: replace(_LONG, level=2),
    "bf16": _QUICK,
    "fp16": _QUICK,
    "compiled-bf16": _LONG,
    "onnx": replace(_LONG, most_gain=_MOST_ONNX_GAIN),
    "int8": replace(_LONG, most_gain=_MOST_INT8_GAIN),
}
"""Every step, by its name."""


def is_form(step: str) -> bool:
    """Whether the step is a form in which the model answers, of which one is in use at a time."""
    return step not in (TOKENIZER_CACHE, TOKENIZER_POOL, BATCHING)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a model version so far. `long_builds`: forms built before that took long to build."""

    forwards: int = 0
    texts: int = 0
    golden_rows: int = 0
    forward_s: float = 0.0
    warmed_rows: int = 0
    long_builds: int = 0
    is_asked_for: bool = False
    """An operator wants it now."""
    was_accepted: bool = False
    """An earlier process found the same content to gain by it, on the same kind of machine."""
    form: str = EAGER
    """The form in use."""
    form_gain: float = 1.0
    """How many times faster than the model as built that is."""


@dataclass(frozen=True, slots=True)
class Readiness:
    """`criterion`: by what the step is ready, or what it still waits for; is_in_vain: or why it is not tried."""

    is_ready: bool
    criterion: str
    is_in_vain: bool = False


def readiness(step: str, evidence: Evidence, max_level: int) -> Readiness:
    """Whether a step is to be tried now. What was asked for, or paid off before, need not pay for itself first."""
    threshold = THRESHOLDS[step]
    if threshold.level > max_level:
        return Readiness(False, f"max_level {max_level} < {threshold.level}")
    if reason := _why_in_vain(step, evidence):
        return Readiness(False, reason, is_in_vain=True)
    waives = evidence.is_asked_for or evidence.was_accepted
    worth_s = 0.0 if waives else threshold.min_forward_s
    if worth_s >= _LONG_BUILD_S:
        worth_s *= 1 + evidence.long_builds
    needed = (
        ("forwards", evidence.forwards, 1 if waives and threshold.min_forwards else threshold.min_forwards),
        ("texts", evidence.texts, threshold.min_texts),
        ("golden_rows", evidence.golden_rows, threshold.min_golden_rows),
        ("forward_s", evidence.forward_s, worth_s),
        ("warmed_rows", evidence.warmed_rows, threshold.min_warmed_rows),
    )
    for name, found, least in needed:
        if found < least:
            return Readiness(False, f"{name} {found:g} < {least:g}")
    met = [f"{name} {found:g} >= {least:g}" for name, found, least in needed if least]
    asked = ["asked for"] if evidence.is_asked_for else ["accepted before"] if evidence.was_accepted else []
    return Readiness(True, ", ".join(asked + met))


def _why_in_vain(step: str, evidence: Evidence) -> str:
    """Why a form is not worth a trial beside the one in use; empty: it is."""
    threshold, form, gain = THRESHOLDS[step], evidence.form, evidence.form_gain
    if evidence.is_asked_for or not is_form(step) or form in (EAGER, step):
        return ""
    if threshold.level < THRESHOLDS[form].level:
        return f"{form} is in use, of a higher level"
    if gain * MIN_GAIN <= threshold.most_gain or evidence.was_accepted:
        return ""
    return (
        f"{form} is {gain:.1f} times as fast as the model as built; {step} was at most {threshold.most_gain:g} times, "
        "wherever it was measured beside such a gain"
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """One step was enabled, disabled or refused, by which criterion, on which evidence, and why."""

    step: str
    action: Action
    criterion: str = ""
    reason: str = ""
    """Why it was disabled or refused; empty for what was enabled."""
    gain: float | None = None
    """How many times faster it was than the form in use; None where nothing was measured."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    made: Mapping[str, object] = field(default_factory=dict)
    """How a compiled form was made, as plain data: see CompilationReport."""

    @property
    def level(self) -> int:
        """The level that the step belongs to."""
        return THRESHOLDS[self.step].level


@dataclass(frozen=True, slots=True)
class LevelState:
    """Where a model version stands: the decisions so far, applied."""

    enabled: frozenset[str] = frozenset()
    form: str = EAGER
    form_gain: float = 1.0
    """How many times faster than the model as built that is."""
    settled: Mapping[str, Decision] = field(default_factory=dict)
    """The last decision on each step that was decided on: it is not tried again."""

    @property
    def level(self) -> int:
        """The highest level of a step that is on."""
        return max((THRESHOLDS[step].level for step in self.enabled), default=0)

    def apply(self, decision: Decision) -> LevelState:
        """The standing after a decision. A form that is enabled replaces the one in use."""
        step, settled = decision.step, {**self.settled, decision.step: decision}
        if decision.action == "enabled":
            if not is_form(step):
                return replace(self, enabled=self.enabled | {step}, settled=settled)
            # Found in comparison with the form that it replaces.
            gain = self.form_gain * (decision.gain or 1.0)
            return LevelState(self.enabled - {self.form} | {step}, step, gain, settled)
        form, gain = (EAGER, 1.0) if self.form == step else (self.form, self.form_gain)
        return LevelState(self.enabled - {step}, form, gain, settled)


def replay(decisions: Iterable[Decision]) -> LevelState:
    """The standing that these decisions led to."""
    level_state = LevelState()
    for decision in decisions:
        level_state = level_state.apply(decision)
    return level_state
