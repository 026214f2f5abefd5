"""The purge of a queue: every waiting job is withdrawn, and ends as cancelled for its client.

    waiting entries --> header --> sealed "Cancelled" result --> withdraw, a few hundred per call

Results are signed. As a worker does, a purge needs the key with which each job was signed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.registry.broker.base import Broker, WaitingEntry, Withdrawal
from penstock.registry.envelope import MAX_HEADER_BYTES, Failure, JobHeader, Keyring, peek_job
from penstock.registry.errors import ConfigurationError
from penstock.registry.queues import Priority, is_job_id
from penstock.registry.unrun import unrun_result

__all__ = ["purge"]

_PAGE: Final = 256
_HEAD_BYTES: Final = MAX_HEADER_BYTES + 8
_PURGED: Final = Failure("Cancelled", "An operator purged the queue before the job ran")


def purge(
    broker: Broker,
    slot: str,
    priorities: Sequence[Priority],
    keyring: Keyring,
    *,
    result_ttl_ms: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Withdraw the jobs that wait now; returns their number. Running jobs finish, and newer jobs stay.

    on_progress: called with the count so far. Raises ConfigurationError when a job was signed with a key that
    `keyring` does not have; that job and those after it stay in the queue.
    """
    withdrawn = 0
    # Not a time: the ids of entries go on from the last one when the broker's clock is set back.
    newest = {priority: broker.newest_entry(slot, priority) for priority in priorities}
    for priority, bound in newest.items():
        after = b""
        while bound and (page := broker.waiting(slot, priority, after, _PAGE, _HEAD_BYTES)):
            older = [waiting for waiting in page if _order(waiting.entry_id) <= _order(bound)]
            jobs = [_withdrawal(waiting, slot, keyring) for waiting in older]
            withdrawn += broker.withdraw(slot, priority, jobs, result_ttl_ms)
            on_progress(withdrawn)
            if len(older) < len(page):
                break
            after = page[-1].entry_id
    return withdrawn


def _order(entry_id: bytes) -> tuple[int, int]:
    milliseconds, _, number = entry_id.partition(b"-")
    return int(milliseconds), int(number)


def _withdrawal(waiting: WaitingEntry, slot: str, keyring: Keyring) -> Withdrawal:
    header = peek_job(waiting.head)
    if header is None or not is_job_id(header.id, slot):
        return Withdrawal(waiting.entry_id)
    return Withdrawal(waiting.entry_id, header.id, header.tenant, _cancelled(header, keyring))


def _cancelled(job: JobHeader, keyring: Keyring) -> bytes:
    # The result is signed with the key of the job: its producer has that key, also during a rotation.
    if job.key and job.key not in keyring.ids:
        raise ConfigurationError(
            f"The jobs are signed with key {job.key!r:.70}, which is not known here, and their results must be signed "
            "with the same key. Expected it in PENSTOCK_SIGNING_KEYS"
        )
    return unrun_result(job.id, job.context, _PURGED, keyring, key=job.key)
