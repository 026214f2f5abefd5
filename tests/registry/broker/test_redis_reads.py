"""Records read in calls of bounded size; a record that changes between two calls is read again."""

from __future__ import annotations

from typing import Any

from penstock.registry.broker.base import JobRecord, State
from penstock.registry.broker.limits import CALL_BYTES
from penstock.registry.broker.redis_reads import Steps, T, read_job_record, read_job_records
from penstock.registry.broker.redis_scripts import Call, script_of
from penstock.registry.queues import new_job_id

LARGE = b"C-" + bytes(2 * CALL_BYTES + 5)


def _run(steps: Steps[T], *answers: Any) -> tuple[T, list[Call]]:
    """What the steps return when they are sent these answers, and the commands that they yielded."""
    calls, given = [steps.send(None)], iter(answers)
    while True:
        try:
            calls.append(steps.send(next(given)))
        except StopIteration as end:
            return end.value, calls


def _pieces(record: bytes) -> list[bytes]:
    return [record[start : start + CALL_BYTES] for start in range(0, len(record), CALL_BYTES)]


def test_a_large_record_is_read_piece_by_piece():
    """The first call has its first piece and its size; no call asks for more than one piece."""
    first, *others = _pieces(LARGE)
    record, (begin, *calls) = _run(read_job_record(new_job_id("m")), [first, len(LARGE)], *others)
    assert record == JobRecord(State.COMPLETED, "", LARGE[2:])
    assert (script_of(begin), begin[-1]) == ("job_record", CALL_BYTES)
    ranges = [tuple(call[2:]) for call in calls]
    assert ranges == [(CALL_BYTES, 2 * CALL_BYTES - 1), (2 * CALL_BYTES, len(LARGE) - 1)]


def test_a_record_that_expired_between_two_pieces_is_read_again():
    """Then it is missing."""
    first, second, _ = _pieces(LARGE)
    record, calls = _run(read_job_record(new_job_id("m")), [first, len(LARGE)], second, b"", None)
    assert record is None
    assert [script_of(call) for call in calls] == ["job_record", "", "", "job_record"]


def test_records_that_did_not_fit_are_asked_for_again():
    """In the next call; one that fits into no call is read piece by piece."""
    ids = [new_job_id("m") for _ in range(4)]
    first, *others = _pieces(LARGE)
    answers = [[b"C-a", CALL_BYTES, None, len(LARGE)], [first, len(LARGE)], *others, [b"F-b"]]
    records, calls = _run(read_job_records(ids), *answers)
    expected = [(State.COMPLETED, b"a"), (State.FAILED, b"b"), None, (State.COMPLETED, LARGE[2:])]
    assert [record and (record.state, record.result) for record in records] == expected
    assert [script_of(call) for call in calls] == ["job_records", "job_record", "", "", "job_records"]
    assert calls[-1][3] in calls[0]


def test_each_call_reads_one_model():
    """Its keys lie in one slot; an empty list needs no call."""
    ids = [new_job_id("a"), new_job_id("b"), new_job_id("a")]
    records, calls = _run(read_job_records(ids), [b"C-1", b"C-3"], [b"C-2"])
    assert [record and record.result for record in records] == [b"1", b"2", b"3"]
    assert [call[2] for call in calls] == [2, 1]
    steps = read_job_records([])
    assert next(steps, "ended") == "ended"
