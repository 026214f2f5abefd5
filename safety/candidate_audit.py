"""Circuit breakers of candidates -> entries of the audit log, from which orchestrator.replayed reads their states.

A candidate that is stopped is stopped without a record, too. One that comes back has its record first.
"""

from __future__ import annotations

from typing import Final

from penstock.registry.broker.breakers import split_breaker_name
from penstock.safety.audit import STATE_CHANGE, AuditLogger

__all__ = ["audit_readmitted", "audit_stopped"]

_LEVEL: Final = 0
"""A version has no optimization level of its own."""


def audit_stopped(log: AuditLogger, name: str, reason: str, *, by: str) -> None:
    """The breaker of this name has opened. by: what opened it: `canary`, `drift` or `failures`. Raises OSError."""
    _log(log, name, "disabled", reason, by)


def audit_readmitted(log: AuditLogger, name: str, reason: str, *, by: str) -> None:
    """The breaker of this name is about to close. by: what closes it. Raises OSError: then it must not."""
    _log(log, name, "enabled", reason, by)


def _log(log: AuditLogger, name: str, result: str, reason: str, by: str) -> None:
    model, local = split_breaker_name(name)
    version = local.partition(":")[0]
    log.log_event(STATE_CHANGE, model, local, result, {"version": version, "level": _LEVEL, "reason": reason, "by": by})
