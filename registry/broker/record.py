"""A job's record as its key in the broker stores it. Pure."""

from __future__ import annotations

from typing import Final

from penstock.registry.broker.base import JobRecord, State
from penstock.registry.queues import Priority

__all__ = ["encode_result", "parse_place", "parse_record"]

_STATES: Final = {state.value: state for state in State}
_HEADS: Final = {state: state.value.encode() + b"-" for state in State}


def parse_record(record: bytes) -> JobRecord:
    """The record as far as its bytes tell it. A terminal record has its tenant inside its sealed result."""
    letter = chr(record[0])
    if letter in "QK":
        tenant = record.split(b"\n", 2)[1].decode()
        return JobRecord(State.QUEUED, tenant, cancel_requested=letter == "K")
    return JobRecord(_STATES[letter], "", record[2:])


def parse_place(record: bytes) -> tuple[Priority, bytes] | None:
    """The queue entry of a job that has not ended: its priority and its id. None for a terminal record."""
    if chr(record[0]) not in "QK":
        return None
    head = record.partition(b"\n")[0]
    return Priority(int(head[2:3])), head[3:]


def encode_result(state: State, sealed: bytes) -> bytes:
    """A terminal record: the letter of its state, a dash, the sealed result."""
    return _HEADS[state] + sealed
