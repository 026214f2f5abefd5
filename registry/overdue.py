"""Waiting jobs whose deadline or lifetime has passed --> sealed "Expired" results --> withdrawn from the queue.

A worker ends such jobs when it claims them, and a client ends its own when it asks for them. A paused model hands out
no jobs: its live workers look through the queue instead, one page at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from penstock.registry.broker.base import OperatorEnd, State, WaitingEntry, Withdrawal
from penstock.registry.envelope import Keyring, peek_job
from penstock.registry.queues import Priority, is_job_id
from penstock.registry.unrun import EXPIRED, unrun_result

__all__ = ["OverdueJobs"]

_PAGE: Final = 128
_HEAD_BYTES: Final = 4096
"""Longer headers are rare; their jobs stay until a worker claims them."""


class OverdueJobs:
    """Ends overdue jobs of the queues it is called for. Belongs to one thread.

    keyring: a job that is signed with another key stays. worker: the name that the results give.
    """

    def __init__(
        self, broker: OperatorEnd, keyring: Keyring, *, job_ttl_ms: int, result_ttl_ms: int, worker: str = ""
    ) -> None:
        self._broker = broker
        self._keyring = keyring
        self._job_ttl_ms = job_ttl_ms
        self._result_ttl_ms = result_ttl_ms
        self._worker = worker
        self._cursors: dict[tuple[str, Priority], bytes] = {}

    def end_some(self, slot: str, now_ms: float) -> int:
        """Look at the next page of each of the slot's queues; returns how many jobs ended.

        now_ms: the broker's clock. Raises BrokerUnavailable.
        """
        return sum(self._end_page(slot, priority, now_ms) for priority in Priority)

    def _end_page(self, slot: str, priority: Priority, now_ms: float) -> int:
        page = self._broker.waiting(slot, priority, self._cursors.get((slot, priority), b""), _PAGE, _HEAD_BYTES)
        # After the last page, begin again.
        self._cursors[slot, priority] = page[-1].entry_id if len(page) == _PAGE else b""
        return self._broker.withdraw(slot, priority, list(self._overdue(page, slot, now_ms)), self._result_ttl_ms)

    def _overdue(self, page: list[WaitingEntry], slot: str, now_ms: float) -> Iterator[Withdrawal]:
        for waiting in page:
            job = peek_job(waiting.head)
            if job is None or not is_job_id(job.id, slot) or (job.key and job.key not in self._keyring.ids):
                continue
            lifetime_ms = min(job.deadline_ms or self._job_ttl_ms, self._job_ttl_ms)
            if now_ms > waiting.accepted_ms + lifetime_ms:
                sealed = unrun_result(job.id, job.context, EXPIRED, self._keyring, worker=self._worker, key=job.key)
                yield Withdrawal(waiting.entry_id, job.id, job.tenant, sealed, State.EXPIRED)
