"""The one gate: evidence about a candidate -> a decision, recorded before it takes effect.

golden jobs -- what serves --> expected --.
     '------- the candidate --> outputs ---+--> judge --> Judgement -------.
               a validator for each output -'    gain, figures, problems --+--> GateEvidence
    gate_optimization(name, subject, evidence) -- record --> GateDecision: accepted, or all reasons against it

Nothing switches an optimisation on without an accepted GateDecision, and only this module makes one. A decision that
cannot be recorded is no decision: `gate_optimization` raises, and nothing changes. `replayed` tells from the recorded
entries alone which optimisations are on. Pure but for the injected recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import numpy as np

from penstock.registry.tensors import Array
from penstock.safety.audit import STATE_CHANGE
from penstock.safety.audit_chain import AuditEntry
from penstock.safety.validator_registry import compare_outputs
from penstock.safety.validators import Comparison, Validator, Verdict

__all__ = [
    "Action",
    "GateDecision",
    "GateEvidence",
    "Judgement",
    "OptimizationState",
    "Record",
    "SafetyOrchestrator",
    "StateKey",
    "Subject",
    "joined",
    "judge",
    "replayed",
]

Outputs = Mapping[str, Array]
Action = Literal["enabled", "disabled", "refused"]


@dataclass(frozen=True, slots=True)
class Subject:
    """What a decision is about: one content of one version of a model."""

    model: str
    version: str
    content_hash: str = ""


@dataclass(frozen=True, slots=True)
class Judgement:
    """A candidate's outputs beside the expected ones. `comparisons`: by output. `rows`: golden rows."""

    reasons: tuple[str, ...]
    comparisons: Mapping[str, Comparison] = field(default_factory=dict)
    validators: Mapping[str, str] = field(default_factory=dict)
    """Output -> the class of its validator."""
    rows: int = 0

    @property
    def accepted(self) -> bool:
        """Whether nothing speaks against the candidate."""
        return not self.reasons

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the outputs."""
        found = {comparison.verdict for comparison in self.comparisons.values()}
        if self.reasons or Verdict.FAIL in found:
            return Verdict.FAIL
        return Verdict.MARGINAL if Verdict.MARGINAL in found else Verdict.PASS

    @property
    def figures(self) -> dict[str, float]:
        """The figures by `<output>.<figure>`, and the number of golden rows as `rows`."""
        found = {
            f"{output}.{name}": value
            for output, comparison in self.comparisons.items()
            for name, value in comparison.values.items()
        }
        return {"rows": float(self.rows), **found}


@dataclass(frozen=True, slots=True)
class GateEvidence:
    """What was found about an optimisation.

    problems: why it could not be built or compared. figures: everything that was measured. gain: how many times faster
    it is than what serves; None where speed was not measured. made: how it was made, as plain data.
    """

    problems: tuple[str, ...] = ()
    judgement: Judgement | None = None
    figures: Mapping[str, float] = field(default_factory=dict)
    gain: float | None = None
    min_gain: float = 0.0
    made: Mapping[str, object] = field(default_factory=dict)

    @property
    def measured(self) -> dict[str, float]:
        """All finite figures."""
        judged = self.judgement.figures if self.judgement is not None else {}
        return {name: value for name, value in {**judged, **self.figures}.items() if isfinite(value)}

    @property
    def reasons(self) -> tuple[str, ...]:
        """Every reason against the optimisation. Evidence without a figure is no evidence."""
        found = list(self.problems)
        if self.judgement is not None:
            found += self.judgement.reasons
        if self.gain is not None and not self.gain >= self.min_gain:
            found.append(f"gain {self.gain:.2f}, expected at least {self.min_gain:g}")
        if not found and not self.measured and self.gain is None:
            found.append("no evidence, expected at least one figure")
        return tuple(found)


@dataclass(frozen=True, slots=True)
class GateDecision:
    """One decision of the gate. SafetyOrchestrator makes it, and it is recorded when a caller gets it."""

    optimization: str
    subject: Subject
    action: Action
    level: int
    criterion: str
    """Why it was tried or disabled."""
    reasons: tuple[str, ...]
    evidence: Mapping[str, float]
    verdict: Verdict
    validators: Mapping[str, str]
    gain: float | None
    made: Mapping[str, object]

    @property
    def accepted(self) -> bool:
        """Whether the optimisation may be switched on."""
        return self.action == "enabled"

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


Record: TypeAlias = Callable[[GateDecision], object]
"""Writes a decision to the audit log. Raises when it could not."""


class SafetyOrchestrator:
    """The gate. record: writes each decision before it takes effect. For any thread that the recorder is for."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def gate_optimization(
        self, name: str, subject: Subject, evidence: GateEvidence, *, level: int = 0, criterion: str = ""
    ) -> GateDecision:
        """Decides whether an optimisation may be switched on, and records the decision.

        criterion: why it was tried. Raises what the recorder raises: then it must not be switched on.
        """
        reasons = evidence.reasons
        judgement = evidence.judgement
        return self._recorded(
            GateDecision(
                name,
                subject,
                "refused" if reasons else "enabled",
                level,
                criterion,
                reasons,
                evidence.measured,
                Verdict.FAIL if reasons else judgement.verdict if judgement is not None else Verdict.PASS,
                judgement.validators if judgement is not None else {},
                evidence.gain,
                evidence.made,
            )
        )

    def disable_optimization(
        self, name: str, subject: Subject, reason: str, *, level: int = 0, criterion: str = ""
    ) -> GateDecision:
        """Records that an optimisation was switched off. Needs no evidence: off is safe.

        Raises what the recorder raises. It must be switched off all the same.
        """
        return self._recorded(
            GateDecision(name, subject, "disabled", level, criterion, (reason,), {}, Verdict.FAIL, {}, None, {})
        )

    def _recorded(self, decision: GateDecision) -> GateDecision:
        self._record(decision)
        return decision


def judge(
    candidate: Sequence[Outputs], golden: Sequence[Outputs], validators: Mapping[str, Validator], min_rows: int = 1
) -> Judgement:
    """Compares two runs of the same batches by output. Each validator gets all rows in one call.

    A validator that judges job by job gets batch by batch. min_rows: with fewer golden rows a candidate is refused.
    """
    used = {name: type(validator).__name__ for name, validator in validators.items()}
    if not validators:
        return Judgement(("no output has a validator, expected one for at least one output",))
    reasons = [reason for name in validators if (reason := _misshapen(name, candidate, golden))]
    if reasons:
        return Judgement(tuple(reasons), {}, used)
    rows = _row_count(golden)
    if rows < min_rows:
        reasons.append(f"{rows} golden rows, expected at least {min_rows}")
    pairs = validators.items() if rows else ()
    comparisons = {name: _compared(name, validator, candidate, golden) for name, validator in pairs}
    reasons += [f"{name}: {reason}" for name, found in comparisons.items() for reason in found.reasons]
    return Judgement(tuple(reasons), comparisons, used, rows)


def _compared(name: str, validator: Validator, candidate: Sequence[Outputs], golden: Sequence[Outputs]) -> Comparison:
    if not getattr(validator, "is_per_job", False):
        ours, expected = (joined([{name: each[name]} for each in side])[name] for side in (candidate, golden))
        return compare_outputs(validator, ours, expected)
    total = Comparison()
    for ours_of_batch, expected_of_batch in zip(candidate, golden, strict=True):
        total = total.merged(compare_outputs(validator, ours_of_batch[name], expected_of_batch[name]))
    return total


def _row_count(golden: Sequence[Outputs]) -> int:
    return sum(len(next(iter(outputs.values()), ())) for outputs in golden)


def _misshapen(name: str, candidate: Sequence[Outputs], golden: Sequence[Outputs]) -> str:
    if len(candidate) != len(golden):
        return f"{name}: {len(candidate)} batches, expected {len(golden)}"
    for ours, expected in zip(candidate, golden, strict=True):
        if name not in ours:
            return f"{name}: missing"
        if ours[name].shape != expected[name].shape and ours[name].dtype.kind == "f":
            return f"{name}: shape {ours[name].shape}, expected {expected[name].shape}"
    return ""


def joined(batches: Sequence[Outputs]) -> dict[str, Array]:
    """The rows of all batches. Rows of different lengths are padded with zeros to the longest."""
    names = batches[0] if batches else ()
    return {name: _concatenated([outputs[name] for outputs in batches]) for name in names}


def _concatenated(parts: Sequence[Array]) -> Array:
    if len({part.ndim for part in parts}) == 1:
        widest = tuple(max(extents) for extents in zip(*(part.shape[1:] for part in parts), strict=True))
        parts = [_padded(part, widest) for part in parts]
    return np.concatenate(parts)


def _padded(part: Array, extents: tuple[int, ...]) -> Array:
    missing = [(0, 0), *((0, wide - own) for wide, own in zip(extents, part.shape[1:], strict=True))]
    return np.pad(part, missing) if any(after for _, after in missing) else part


@dataclass(frozen=True, slots=True)
class OptimizationState:
    """The state of one optimisation of one content, as the last entry about it says."""

    action: Action
    level: int = 0
    time: float = 0.0
    """Unix seconds of the entry."""
    reason: str = ""

    @property
    def is_on(self) -> bool:
        """Whether it was switched on and not off since."""
        return self.action == "enabled"


class StateKey(NamedTuple):
    """One optimisation in one process. run: the mark of the process in its entries; empty where they have none."""

    run: str
    model: str
    content_hash: str
    optimization: str


_ACTIONS: Final = ("enabled", "disabled", "refused")


def replayed(entries: Iterable[AuditEntry]) -> dict[StateKey, OptimizationState]:
    """The state of every optimisation that a decision was made about, from the audit log alone.

    entries: of the log, oldest first. One form of a model is in use at a time: an entry `enabled` that `replaces`
    another form ends that one. Entries about other things are passed over.
    """
    states: dict[StateKey, OptimizationState] = {}
    for entry in entries:
        details: Mapping[str, Any] = entry.details
        if entry.operation != STATE_CHANGE or entry.result not in _ACTIONS:
            continue
        run, content_hash, reason = (str(details.get(name, "")) for name in ("run", "content_hash", "reason"))
        key = StateKey(run, str(entry.model_id), content_hash, entry.optimization_name)
        level = details.get("level")
        state = OptimizationState(
            entry.result,  # type: ignore[arg-type] # one of _ACTIONS
            level if isinstance(level, int) else 0,
            entry.time,
            reason,
        )
        if state.is_on and (replaced := str(details.get("replaces", ""))):
            ended = OptimizationState("disabled", state.level, entry.time, f"{entry.optimization_name} replaces it")
            states[key._replace(optimization=replaced)] = ended
        states[key] = state
    return states
