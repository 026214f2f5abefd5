"""An attached version -> plain data for `penstock models levels`, and a decision -> one line for operators."""

from __future__ import annotations

from dataclasses import asdict

from penstock.workers.levels.attached import AttachedVersion
from penstock.workers.levels.progression import THRESHOLDS, Decision, StepReadiness
from penstock.workers.runtime.base import Counted

__all__ = ["described", "version_entry"]


def version_entry(version: AttachedVersion) -> dict[str, object]:
    """The version's level, what each step gained, and what the other steps wait for."""
    level_state, profile = version.level_state, version.profiler.profile
    goldens = version.profiler.goldens
    return {
        "version": version.key.version,
        "content_hash": version.key.content_hash,
        "level": level_state.level,
        "max_level": version.max_level,
        "form": level_state.form,
        "profile": {**asdict(profile), "rows_per_s": round(profile.rows_per_s, 1)},
        "goldens": {"jobs": len(goldens), "bytes": goldens.nbytes} if goldens is not None else None,
        "answers": version.answers,
        "answer": version.answer,
        "counts": dict(version.runtime.counts()) if isinstance(version.runtime, Counted) else {},
        "steps": [_step_entry(version, step) for step in version.steps_by_level],
    }


def _step_entry(version: AttachedVersion, step: str) -> dict[str, object]:
    """`gain` is None where nothing was measured."""
    level_state = version.level_state
    # The measurement of an earlier process counts until this process has its own.
    decision = level_state.settled.get(step) or version.measured.get(step) or version.earlier.get(step)
    found = version.readiness(step)
    state = _state(version, step, decision, found)
    return {
        "step": step,
        "level": THRESHOLDS[step].level,
        "state": state,
        "criterion": decision.criterion if decision and state == "on" else found.criterion,
        "reason": decision.reason if decision else "",
        "gain": decision.gain if decision else None,
        "evidence": dict(decision.evidence) if decision else {},
        "made": dict(decision.made) if decision else {},
    }


def _state(version: AttachedVersion, step: str, decision: Decision | None, found: StepReadiness) -> str:
    """`on`, `disabled`, `refused`, `waiting`, `not tried`, or `not allowed` by max_level."""
    if step in version.level_state.enabled:
        return "on"
    if THRESHOLDS[step].level > version.max_level:
        return "not allowed"
    if decision is not None and decision.action != "enabled" and not version.may_try(step):
        return decision.action
    return "not tried" if found.is_in_vain else "waiting"


def described(decision: Decision) -> str:
    """The step, the decision on it, its gain and its reason."""
    gain = "" if decision.gain is None else f", {decision.gain:.2f} times as fast as the form in use"
    return f"{decision.step} {decision.action}{gain}{f': {decision.reason}' if decision.reason else ''}"
