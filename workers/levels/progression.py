"""A profile -> the step that a model may take next. Pure: a table of criteria, and the state that decisions lead to.

    level 0   profile only
    level 1   tokenizer-cache, tokenizer-pool     exact: token ids stay equal
    level 2   batching (2a); prepacked, compiled, onnx (2b)    the same numbers, within the tolerance
    level 3   bf16, fp16, compiled-bf16, int8    other arithmetic, judged by the validator of its precision

A step is tried when its criterion holds, and enabled when its trial passed. A form with a long build is not tried while
the form in use is faster than the other form ever was. Every decision is an event, and the state is the events applied
in order: replaying the log gives the state again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import inf
from typing import Final

from penstock.safety.orchestrator import Action, GateDecision
from penstock.workers.runtime.forms import EAGER

__all__ = [
    "BATCHING",
    "COMPILED",
    "HIGHEST_LEVEL",
    "MIN_GAIN",
    "SAME_PRECISION",
    "THRESHOLDS",
    "TOKENIZER_CACHE",
    "TOKENIZER_POOL",
    "Decision",
    "Evidence",
    "LevelState",
    "StepReadiness",
    "Threshold",
    "is_form",
    "readiness",
    "replay",
]

HIGHEST_LEVEL: Final = 3
"""A max_level of 4 means the same as 3."""
MIN_GAIN: Final = 1.1
"""A form must be this many times faster than the form in use: less is noise, and a second form costs memory."""
TOKENIZER_CACHE: Final = "tokenizer-cache"
TOKENIZER_POOL: Final = "tokenizer-pool"
BATCHING: Final = "batching"
COMPILED: Final = "compiled"
SAME_PRECISION: Final = frozenset({"prepacked", COMPILED, "onnx"})
"""The forms of level 2: their outputs stay within the tolerance."""

_SOME_FORWARDS: Final = 20
_SOME_GOLDEN_ROWS: Final = 16
_QUICK_BUILD_S: Final = 2.0
"""A cast or a packing of the weights takes less than a second of a core."""
_LONG_BUILD_S: Final = 60.0
"""Compiling and exporting take some 20 s of a core. A model that has run three times as long is worth that."""
_MOST_ONNX_GAIN: Final = 2.0
_MOST_INT8_GAIN: Final = 4.0
"""On one CPU thread, for models that spend their time on arithmetic: MiniLM ran 1.8 times as fast by ONNX and 3.5 times
by int8. A small MLP, which spends its time in the framework, ran 2.8 and 7.9 times as fast by these and no faster by
the other forms."""


@dataclass(frozen=True, slots=True)
class Threshold:
    """The least evidence for a trial of a step. `min_forward_s`: seconds of forwards, for each long build.

    most_gain: the highest measured gain over the eager model, among models that gain by other forms as well. A form
    without one is not tried while a form of a higher level is in use.
    """

    level: int
    min_forwards: int = 0
    min_texts: int = 0
    min_golden_rows: int = 0
    min_forward_s: float = 0.0
    most_gain: float = inf


_QUICK: Final = Threshold(3, _SOME_FORWARDS, 0, _SOME_GOLDEN_ROWS, _QUICK_BUILD_S)
_LONG: Final = Threshold(3, _SOME_FORWARDS, 0, _SOME_GOLDEN_ROWS, _LONG_BUILD_S)

THRESHOLDS: Final[Mapping[str, Threshold]] = {
    TOKENIZER_CACHE: Threshold(1, min_texts=32),
    TOKENIZER_POOL: Threshold(1, min_texts=256, min_golden_rows=_SOME_GOLDEN_ROWS),
    BATCHING: Threshold(2, min_golden_rows=_SOME_GOLDEN_ROWS),
    "prepacked": replace(_QUICK, level=2),
    COMPILED: replace(_LONG, level=2),
    "onnx": replace(_LONG, level=2, most_gain=_MOST_ONNX_GAIN),
    "bf16": _QUICK,
    "fp16": _QUICK,
    "compiled-bf16": _LONG,
    "int8": replace(_LONG, most_gain=_MOST_INT8_GAIN),
}
"""Every step, by its name."""


def is_form(step: str) -> bool:
    """Whether the step is a form of the model. One form is in use at a time."""
    return step not in (TOKENIZER_CACHE, TOKENIZER_POOL, BATCHING)


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a model version so far. `long_builds`: builds so far that took long."""

    forwards: int = 0
    texts: int = 0
    golden_rows: int = 0
    forward_s: float = 0.0
    long_builds: int = 0
    is_requested: bool = False
    """An operator requested it."""
    was_accepted: bool = False
    """An earlier process enabled it for the same content, on the same kind of machine."""
    form: str = EAGER
    """The form in use."""
    form_gain: float = 1.0
    """How many times faster than the eager model that form is."""


@dataclass(frozen=True, slots=True)
class StepReadiness:
    """`criterion`: why the step is ready, or its missing condition. With `is_in_vain`: why it is never tried."""

    is_ready: bool
    criterion: str
    is_in_vain: bool = False


def readiness(step: str, evidence: Evidence, max_level: int) -> StepReadiness:
    """Whether a step may be tried now. A step that was requested or accepted before needs no minimum of forwards."""
    threshold = THRESHOLDS[step]
    if threshold.level > max_level:
        return StepReadiness(False, f"max_level {max_level} < {threshold.level}")
    if reason := _why_in_vain(step, evidence):
        return StepReadiness(False, reason, is_in_vain=True)
    waives = evidence.is_requested or evidence.was_accepted
    worth_s = 0.0 if waives else threshold.min_forward_s
    if worth_s >= _LONG_BUILD_S:
        worth_s *= 1 + evidence.long_builds
    needed = (
        ("forwards", evidence.forwards, 1 if waives and threshold.min_forwards else threshold.min_forwards),
        ("texts", evidence.texts, threshold.min_texts),
        ("golden_rows", evidence.golden_rows, threshold.min_golden_rows),
        ("forward_s", evidence.forward_s, worth_s),
    )
    for name, found, least in needed:
        if found < least:
            return StepReadiness(False, f"{name} {found:g} < {least:g}")
    met = [f"{name} {found:g} >= {least:g}" for name, found, least in needed if least]
    origin = ["requested"] if evidence.is_requested else ["accepted before"] if evidence.was_accepted else []
    return StepReadiness(True, ", ".join(origin + met))


def _why_in_vain(step: str, evidence: Evidence) -> str:
    """Why a trial of a form is not worthwhile beside the form in use; empty where it is."""
    threshold, form, gain = THRESHOLDS[step], evidence.form, evidence.form_gain
    if evidence.is_requested or not is_form(step) or form in (EAGER, step):
        return ""
    if threshold.level < THRESHOLDS[form].level and threshold.most_gain == inf:
        return f"{form} is in use, of a higher level"
    if gain * MIN_GAIN <= threshold.most_gain or evidence.was_accepted:
        return ""
    return (
        f"{form} is {gain:.1f} times as fast as the eager model; {step} was at most {threshold.most_gain:g} times "
        "as fast in earlier measurements"
    )


@dataclass(frozen=True, slots=True)
class Decision:
    """A step was enabled, disabled or refused: by this criterion, on this evidence, for this reason."""

    step: str
    action: Action
    criterion: str = ""
    reason: str = ""
    """Why it was disabled or refused; empty where it was enabled."""
    gain: float | None = None
    """How many times faster it was than the form in use; None where nothing was measured."""
    evidence: Mapping[str, float] = field(default_factory=dict)
    made: Mapping[str, object] = field(default_factory=dict)
    """How a compiled form was made, as plain data: see CompilationReport."""
    validators: Mapping[str, str] = field(default_factory=dict)
    """Output -> the class of the validator that judged it."""
    replaces: str = ""
    """The form that was in use before this one; empty for the eager model, and for other steps."""

    @classmethod
    def of(cls, gate: GateDecision, replaces: str = "") -> Decision:
        """A decision of the gate."""
        return cls(
            gate.optimization,
            gate.action,
            gate.criterion,
            gate.reason,
            gate.gain,
            gate.evidence,
            gate.made,
            gate.validators,
            replaces if gate.accepted and is_form(gate.optimization) and replaces != EAGER else "",
        )

    @property
    def level(self) -> int:
        """The level of the step."""
        return THRESHOLDS[self.step].level


@dataclass(frozen=True, slots=True)
class LevelState:
    """The state of a model version: its decisions so far, applied in order."""

    enabled: frozenset[str] = frozenset()
    form: str = EAGER
    form_gain: float = 1.0
    """How many times faster than the eager model the form is."""
    settled: Mapping[str, Decision] = field(default_factory=dict)
    """The last decision on each step. A step with a decision is not tried again."""

    @property
    def level(self) -> int:
        """The highest level among the enabled steps."""
        return max((THRESHOLDS[step].level for step in self.enabled), default=0)

    def apply(self, decision: Decision) -> LevelState:
        """The state after a decision. A form that is enabled replaces the form in use."""
        step, settled = decision.step, {**self.settled, decision.step: decision}
        if decision.action == "enabled":
            if not is_form(step):
                return replace(self, enabled=self.enabled | {step}, settled=settled)
            # The gain was measured against the form that is replaced.
            gain = self.form_gain * (decision.gain or 1.0)
            return LevelState(self.enabled - {self.form} | {step}, step, gain, settled)
        form, gain = (EAGER, 1.0) if self.form == step else (self.form, self.form_gain)
        return LevelState(self.enabled - {step}, form, gain, settled)


def replay(decisions: Iterable[Decision]) -> LevelState:
    """The state that these decisions lead to."""
    level_state = LevelState()
    for decision in decisions:
        level_state = level_state.apply(decision)
    return level_state
