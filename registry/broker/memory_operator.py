"""The operators' end of the broker in memory: what it holds, and what operators change."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from penstock.registry.broker.base import (
    DeadLetter,
    Delivery,
    Depth,
    Publication,
    Quarantined,
    Replay,
    Usage,
    WaitingEntry,
    Withdrawal,
)
from penstock.registry.broker.memory_entry_ids import parse_entry_id
from penstock.registry.broker.memory_queue import BANDS, NO_OWNER
from penstock.registry.broker.memory_state import MemoryState
from penstock.registry.broker.memory_webhooks import MemoryWebhookEnd
from penstock.registry.queues import Priority, experiment_key, ratings_key

__all__ = ["MemoryOperatorEnd"]


class MemoryOperatorEnd(MemoryWebhookEnd):
    """The calls of operators on a connection; see OperatorEnd."""

    _state: MemoryState

    def models(self) -> list[str]:
        """See FleetEnd.models."""
        with self._lock:
            return sorted({slot for slot, _ in self._state.specs})

    def usage(self, slot: str) -> dict[tuple[str, str], Usage]:
        """See OperatorEnd.usage."""
        with self._lock:
            return dict(self._state.usage[slot])

    def depths(self, slot: str) -> list[Depth]:
        """See OperatorEnd.depths."""
        with self._lock:
            now_ms = self._state.now_ms()
            queues = self._state.slots[slot].queues
            return [queue.depth(slot, priority, now_ms) for priority, queue in zip(BANDS, queues, strict=True)]

    def committed(self, slot: str) -> int:
        """See OperatorEnd.committed."""
        with self._lock:
            return self._state.slots[slot].committed

    def workers(self) -> list[bytes]:
        """See FleetEnd.workers."""
        with self._lock:
            return self._state.reports.values()

    def activate(self, slot: str, epoch: int, record: bytes, version: str, spec: bytes) -> bool:
        """See FleetEnd.activate."""
        with self._lock:
            known = self._state.activated.get(slot)
            if known is not None and known != (epoch, record) and known[0] >= epoch:
                return False
            self._state.activated[slot] = (epoch, record)
            self._state.specs[slot, ""] = self._state.specs[slot, version] = spec
            return True

    def observations(self, slot: str, experiment: str) -> dict[str, bytes]:
        """See FleetEnd.observations."""
        with self._lock:
            return dict(self._state.experiments.get(experiment_key(slot, experiment)) or {})

    def ratings(self, slot: str, experiment: str) -> dict[str, bytes]:
        """See FleetEnd.ratings."""
        with self._lock:
            return dict(self._state.ratings.get(ratings_key(slot, experiment)) or {})

    def pause(self, slot: str) -> None:
        """See OperatorEnd.pause. Armed claims are paused, too."""
        with self._lock:
            self._state.paused.add(slot)

    def resume(self, slot: str) -> None:
        """See OperatorEnd.resume."""
        with self._lock:
            self._state.paused.discard(slot)
            self._state.serve_armed(slot)

    def waiting(self, slot: str, priority: Priority, after: bytes, count: int, head_bytes: int) -> list[WaitingEntry]:
        """See OperatorEnd.waiting."""
        cursor = parse_entry_id((after or b"0-0").decode())
        with self._lock:
            queue = self._state.queue(slot, priority)
            free = {entry_id: lease.sealed for entry_id, lease in queue.leases.items() if lease.owner == NO_OWNER}
            found = sorted(
                (
                    parse_entry_id(entry_id.decode()),
                    WaitingEntry(entry_id, sealed[:head_bytes], queue.accepted_first_ms.get(entry_id, 0)),
                )
                for entry_id, sealed in {**free, **queue.waiting}.items()
            )
            return [waiting for order, waiting in found if order > cursor][:count]

    def newest_entry(self, slot: str, priority: Priority) -> bytes:
        """See OperatorEnd.newest_entry."""
        with self._lock:
            queue = self._state.queue(slot, priority)
            entries = [*queue.waiting, *queue.leases]
            return max(entries, key=lambda entry_id: parse_entry_id(entry_id.decode()), default=b"")

    def queued_job(self, job_id: str) -> Delivery | None:
        """See OperatorEnd.queued_job."""
        with self._lock:
            return self._state.queued_job(job_id)

    def withdraw(self, slot: str, priority: Priority, jobs: Sequence[Withdrawal], result_ttl_ms: int) -> int:
        """See OperatorEnd.withdraw."""
        with self._lock:
            return sum(self._state.withdraw(slot, priority, job, result_ttl_ms) for job in jobs)

    def replay(
        self, slot: str, entry: str, job: Publication, job_ttl_ms: int, *, keeps_acceptance: bool = False
    ) -> Replay:
        """See OperatorEnd.replay."""
        with self._lock:
            outcome = self._state.replay(slot, entry, job, job_ttl_ms, keeps_acceptance)
            self._state.serve_armed(slot)
            return outcome

    def purge_dead(self, slot: str, entries: Sequence[str]) -> int:
        """See OperatorEnd.purge_dead."""
        with self._lock:
            letters = self._state.slots[slot].dead_letters
            return sum(letters.pop(entry, None) is not None for entry in entries)

    def dead_letters(self, slot: str, after: str = "", count: int = 100) -> list[DeadLetter]:
        """See OperatorEnd.dead_letters."""
        cursor = parse_entry_id(after or "0-0")
        with self._lock:
            letters = self._state.slots[slot].dead_letters.values()
            later = [letter for letter in letters if parse_entry_id(letter.entry) > cursor]
            return [structs.replace(letter, sealed=b"") for letter in later[:count]]

    def read_dead_letter(self, slot: str, entry: str) -> DeadLetter | None:
        """See OperatorEnd.read_dead_letter."""
        with self._lock:
            return self._state.slots[slot].dead_letters.get(entry)

    def quarantined(self, slot: str = "") -> list[Quarantined]:
        """See OperatorEnd.quarantined. No other program writes here."""
        return []
