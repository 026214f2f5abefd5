"""A job's record as its key in the broker stores it. Pure."""

from __future__ import annotations

from typing import Final

from penstock.registry.broker.base import JobRecord, State

__all__ = ["encode_result", "parse_record"]

_STATES: Final = {state.value: state for state in State}
_HEADS: Final = {state: state.value.encode() + b"-" for state in State}


def parse_record(record: bytes) -> JobRecord:
    """The record as far as its bytes tell it. A terminal record has its tenant inside its sealed result."""
    letter = chr(record[0])
    if letter in "QK":
        tenant = record.split(b"\n", 2)[1].decode()
        return JobRecord(State.QUEUED, tenant, cancel_requested=letter == "K")
    return JobRecord(_STATES[letter], "", record[2:])


def encode_result(state: State, sealed: bytes) -> bytes:
    """A terminal record: the letter of its state, a dash, the sealed result."""
    return _HEADS[state] + sealed
