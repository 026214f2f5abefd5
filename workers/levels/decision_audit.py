"""Decisions of the gate -> entries of the audit log: the verdict on a step with its evidence, then the step's state.

penstock.safety.orchestrator.replayed reads the states again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.safety.audit import GATE_DECISION, STATE_CHANGE, AuditLogger

__all__ = ["audit_decision"]

_STATE: Final = ("level", "criterion", "reason", "version", "content_hash", "run", "replaces")
"""What the second entry repeats of the first one, so that it can be read alone."""


def audit_decision(log: AuditLogger, facts: Mapping[str, object]) -> None:
    """Records a decision, as DecisionLog.append returns it. Raises OSError: then it must not take effect.

    A step that is switched off needs no verdict, and has one entry.
    """
    model, step, action = (str(facts[name]) for name in ("model", "step", "action"))
    evidence = {name: value for name, value in facts.items() if name not in ("model", "step", "action", "time")}
    if action != "disabled":
        log.log_event(GATE_DECISION, model, step, "PASS" if action == "enabled" else "FAIL", evidence)
        evidence = {name: facts[name] for name in _STATE if name in facts}
    log.log_event(STATE_CHANGE, model, step, action, evidence)
