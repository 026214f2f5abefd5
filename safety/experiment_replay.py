"""The audit log -> the state of every rollout and A/B experiment, from the log alone.

orchestrator.replayed rebuilds the states of optimizations and of candidates' breakers from the same entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, TypeAlias

from penstock.safety.audit_chain import AuditEntry
from penstock.safety.rollout import ROLLOUT_DECISION

__all__ = ["ExperimentState", "replayed_experiments"]

Status: TypeAlias = Literal["running", "paused", "stopped", "completed"]
_STATUS: Final[Mapping[str, Status]] = {
    "begin": "running",
    "advance": "running",
    "hold": "running",
    "step_back": "running",
    "resume": "running",
    "pause": "paused",
    "stop": "stopped",
    "refused": "stopped",
    "roll_back": "stopped",
    "complete": "completed",
}


@dataclass(frozen=True, slots=True)
class ExperimentState:
    """One experiment, as the last entry about it says. shares: of the jobs, by version; empty once it has ended."""

    status: Status
    shares: Mapping[str, float] = field(default_factory=dict)
    time: float = 0.0
    """Unix seconds of the entry."""
    reason: str = ""


def replayed_experiments(entries: Iterable[AuditEntry]) -> dict[tuple[str, str], ExperimentState]:
    """The state of every experiment by (model, experiment). entries: of the log, oldest first.

    An experiment that was refused after its entry `begin` has the status stopped. Entries about other things are passed
    over.
    """
    states: dict[tuple[str, str], ExperimentState] = {}
    for entry in entries:
        status = _STATUS.get(entry.result)
        if entry.operation != ROLLOUT_DECISION or status is None:
            continue
        details: Mapping[str, Any] = entry.details
        key = (str(entry.model_id), str(details.get("experiment", "")))
        before = states.get(key, ExperimentState(status))
        state = replace(before, status=status, time=entry.time, reason=str(details.get("reason", "")))
        if status in ("stopped", "completed"):
            state = replace(state, shares={})
        elif "shares" in details:
            state = replace(state, shares=dict(details["shares"]))
        states[key] = state
    return states
