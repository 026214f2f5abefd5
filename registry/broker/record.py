"""A job's record as its key in the broker stores it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.registry.broker.base import JobRecord, State
from penstock.registry.queues import Priority

__all__ = ["encode_result", "joined_record", "parse_place", "parse_record", "record_parts"]

_LARGE_BYTES: Final = 64 * 1024
_STATES: Final = {state.value: state for state in State}
_PRIORITIES: Final = {str(int(priority)).encode() for priority in Priority}
_HEADS: Final = {state: state.value.encode() + b"-" for state in State}


def parse_record(record: bytes) -> JobRecord | None:
    """The record as far as its bytes tell it. A terminal record has its tenant inside its sealed result.

    None for bytes that are no record: another program has overwritten it, so that the job is lost.
    """
    letter = chr(record[0]) if record else ""
    if letter and letter in "QK":
        parts = record.split(b"\n", 2)
        if len(parts) < 3:
            return None
        return JobRecord(State.QUEUED, parts[1].decode(errors="replace"), cancel_requested=letter == "K")
    state = _STATES.get(letter)
    return None if state is None else JobRecord(state, "", record[2:])


def joined_record(pieces: Sequence[bytes]) -> JobRecord:
    """A large terminal record from its pieces, of which the first one begins it."""
    first, *rest = pieces
    return JobRecord(_STATES[chr(first[0])], "", b"".join((memoryview(first)[2:], *rest)))


def parse_place(record: bytes) -> tuple[Priority, bytes] | None:
    """The queue entry of a job that has not ended: its priority and its id. None for any other record."""
    head = record.partition(b"\n")[0]
    if head[:1] not in (b"Q", b"K") or head[2:3] not in _PRIORITIES:
        return None
    return Priority(int(head[2:3])), head[3:]


def record_parts(state: State, sealed: bytes) -> bytes | tuple[bytes, bytes]:
    """The same record as `encode_result`; a large one in two parts, without a copy."""
    return _HEADS[state] + sealed if len(sealed) < _LARGE_BYTES else (_HEADS[state], sealed)


def encode_result(state: State, sealed: bytes) -> bytes:
    """A terminal record: the letter of its state, a dash, the sealed result."""
    return _HEADS[state] + sealed
