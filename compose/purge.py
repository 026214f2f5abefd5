"""Emptying a queue: every job that waits is withdrawn, and ends cancelled for whoever submitted it.

    waiting entries --> header --> sealed "Cancelled" result --> withdraw, a few hundred per call

Results are signed: this needs the key that each job was signed with, as a worker does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from penstock.compose.dead_letters import peek
from penstock.registry.broker.base import Broker, Waiting, Withdrawal
from penstock.registry.envelope import MAX_HEADER_BYTES, Failure, JobHeader, Keyring, ResultHeader, seal
from penstock.registry.errors import ConfigurationError
from penstock.registry.queues import Priority, is_job_id

__all__ = ["purge"]

_PAGE: Final = 256
_HEAD_BYTES: Final = MAX_HEADER_BYTES + 8
_PURGED: Final = Failure("Cancelled", "The job was withdrawn before it ran: an operator purged its queue")


def purge(
    broker: Broker,
    slot: str,
    priorities: Sequence[Priority],
    keyring: Keyring,
    *,
    result_ttl_ms: int,
    on_progress: Callable[[int], None] = lambda _: None,
) -> int:
    """Withdraw the jobs that wait now; returns how many. Running ones go on, and what comes meanwhile stays.

    on_progress: called with the count so far. Raises ConfigurationError when a job was signed with a key that
    `keyring` does not hold; that job, and those after it, then wait on.
    """
    withdrawn = 0
    broker.depths(slot)  # The broker's clock is known from here on.
    begun_ms = broker.now_ms()
    for priority in priorities:
        after = b""
        while page := broker.waiting(slot, priority, after, _PAGE, _HEAD_BYTES):
            here = [waiting for waiting in page if int(waiting.entry_id.partition(b"-")[0]) <= begun_ms]
            jobs = [_withdrawal(waiting, slot, keyring) for waiting in here]
            withdrawn += broker.withdraw(slot, priority, jobs, result_ttl_ms)
            on_progress(withdrawn)
            if len(here) < len(page):
                break
            after = page[-1].entry_id
    return withdrawn


def _withdrawal(waiting: Waiting, slot: str, keyring: Keyring) -> Withdrawal:
    header = peek(waiting.head)
    if header is None or not is_job_id(header.id, slot):
        return Withdrawal(waiting.entry_id)
    return Withdrawal(waiting.entry_id, header.id, header.tenant, _cancelled(header, keyring))


def _cancelled(job: JobHeader, keyring: Keyring) -> bytes:
    # The job's own key: its producer holds that one for certain, also in the middle of a rotation.
    if job.key and job.key not in keyring.ids:
        raise ConfigurationError(
            f"The jobs are signed with key {job.key!r:.70}, which is not known here, and so must be the word that they "
            "are withdrawn. Expected it in PENSTOCK_SIGNING_KEYS"
        )
    header = ResultHeader(id=job.id, context=job.context, error=_PURGED, key=job.key)
    return seal("result", header, b"", keyring)
