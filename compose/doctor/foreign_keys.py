"""Checks for keys that another program has written in the place of Penstock's: they were quarantined."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Final

from penstock.compose.doctor.findings import Finding
from penstock.registry.broker.base import OperatorEnd, Quarantined
from penstock.registry.queues import quarantine_key

__all__ = ["check_foreign_keys"]

_MOST_SHOWN: Final = 20


def check_foreign_keys(broker: OperatorEnd) -> Iterator[Finding]:
    """A warning for each key that was quarantined and still exists. Raises BrokerUnavailable."""
    shown = 0
    for slot in ("", *broker.models()):
        found = broker.quarantined(slot)
        yield from map(_finding, found[: _MOST_SHOWN - shown])
        left = len(found) - (_MOST_SHOWN - shown)
        shown = min(_MOST_SHOWN, shown + len(found))
        if left > 0:
            what = f"{left} more keys of other programs were quarantined"
            yield Finding("broker", "warning", what, f"redis-cli ZRANGE '{quarantine_key(slot)}' 0 -1")
    if not shown:
        yield Finding("broker", "ok", "no other program has written over a key of Penstock")


def _finding(each: Quarantined) -> Finding:
    at = datetime.fromtimestamp(each.at_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
    what = f"another program wrote a {each.kind} to {each.key}; it was quarantined at {at}"
    # RENAME instead keeps it for its program.
    return Finding("broker", "warning", what, f"correct that program, then redis-cli UNLINK '{each.name}'")
