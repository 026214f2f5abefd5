"""Records of jobs, read in calls of bounded size. No I/O: each function yields commands and is sent their answers.

    records -> job_records: as many as one call may hold; those that are left over, in further calls
    one large record -> job_record with its first piece -> GETRANGE: the other pieces

A record that has ended does not change. If it expires between two pieces, it is read again from the beginning.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Sequence
from typing import Any, TypeAlias, TypeVar

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import JobRecord
from penstock.registry.broker.limits import CALL_BYTES
from penstock.registry.broker.record import joined_record, parse_record
from penstock.registry.queues import record_key, slot_of

__all__ = ["Steps", "T", "read_job_record", "read_job_records"]

T = TypeVar("T")
Steps: TypeAlias = Generator[scripts.Call, Any, T]
"""Yields a command, is sent its answer, and returns the result."""


def read_job_record(job_id: str, *, subscribe: bool = False) -> Steps[JobRecord | None]:
    """See ProducerEnd.job_record."""
    while True:
        answer = yield scripts.job_record(job_id, subscribe=subscribe)
        if not scripts.is_cut(answer):
            return scripts.parse_job_record(answer)
        first, size = answer
        pieces = [first]
        for start in range(len(first), size, CALL_BYTES):
            end = min(start + CALL_BYTES, size) - 1
            pieces.append((yield ["GETRANGE", record_key(job_id), start, end]))
        if sum(map(len, pieces)) == size:
            return joined_record(pieces)


def read_job_records(job_ids: Sequence[str]) -> Steps[list[JobRecord | None]]:
    """See ProducerEnd.job_records."""
    found: dict[str, JobRecord | None] = {}
    by_slot: defaultdict[str, list[str]] = defaultdict(list)
    for job_id in job_ids:
        by_slot[slot_of(job_id)].append(job_id)
    for wanted in by_slot.values():
        while wanted:
            answers = yield scripts.job_records(wanted)
            left: list[str] = []
            for job_id, answer in zip(wanted, answers, strict=True):
                if not isinstance(answer, int):
                    found[job_id] = None if answer is None else parse_record(answer)
                elif answer > CALL_BYTES:
                    found[job_id] = yield from read_job_record(job_id)
                else:
                    left.append(job_id)
            wanted = left
    return [found[job_id] for job_id in job_ids]
