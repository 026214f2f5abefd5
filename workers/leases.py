"""What a worker holds and how it keeps it: the share of lower priorities, and the leases.

    drain (I/O thread) -- takes, drops --> LeasedJobs <-- renews -- LeaseKeeper (a thread of its own)
                       <-- lost, cancelled, taken over, handed over --'

Leases are renewed for the ids in memory only: a job that was claimed but never arrived here lapses and comes back.
After a gap in its view of the broker a worker waits one lease before it takes over anything: the living ones, who
could not renew either, come first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from penstock.registry.broker.base import Delivery, Held, Renewal, WorkerEnd
from penstock.registry.errors import BrokerUnavailable
from penstock.workers.job import ClaimedJob

__all__ = ["LOWER_SHARE", "LeaseKeeper", "LeaseUpdate", "LeasedJobs"]

LOWER_SHARE: Final = 1 / 8
"""The share of claims that is kept for a lower priority which has waited too long."""
_RELEASED_MS: Final = 3_600_000
"""Jobs that were released look idle for a day; no lease that lapsed by itself is left alone for an hour."""

_OUT_OF_TOUCH_S: Final = 3.0

logger = logging.getLogger("penstock.server")


class LeasedJobs:
    """The jobs in this worker's memory, by entry. Thread-safe."""

    def __init__(self) -> None:
        # Entry ids are their stream's own: only with slot and priority do they name one job.
        self._held: dict[tuple[str, int, bytes], ClaimedJob] = {}
        self._lock = threading.Lock()

    def take(self, jobs: Sequence[ClaimedJob]) -> None:
        """These jobs are in memory now."""
        with self._lock:
            for job in jobs:
                delivery = job.delivery
                self._held[delivery.slot, delivery.priority, delivery.entry_id] = job

    def drop(self, jobs: Sequence[ClaimedJob]) -> None:
        """These jobs are no longer our business."""
        with self._lock:
            for job in jobs:
                delivery = job.delivery
                self._held.pop((delivery.slot, delivery.priority, delivery.entry_id), None)

    def snapshot(self) -> list[Held]:
        """The jobs held at this moment."""
        with self._lock:
            jobs = list(self._held.values())
        return [job.held for job in jobs]

    def __len__(self) -> int:
        return len(self._held)


class LeaseUpdate(NamedTuple):
    """What the lease keeper found out: job entries lost, jobs to stop, jobs taken over from others."""

    renewal: Renewal
    taken_over: list[Delivery]


class LeaseKeeper:
    """Renews leases, takes over lapsed ones and jobs that others hand over, and calls `report` once a second: a thread
    of its own over `tick`.

    slots: the models to take over jobs of. offered: by model, the versions whose jobs others may hand over, and how
    many of each. news: called with what was found, on this thread. look: called before each look for such jobs. room:
    how many jobs may be taken over now. clock: monotonic seconds.
    """

    def __init__(
        self,
        broker: WorkerEnd,
        consumer: str,
        slots: Callable[[], Sequence[str]],
        leased: LeasedJobs,
        *,
        lease_s: float,
        offered: Callable[[], Mapping[str, Mapping[str, int]]],
        room: Callable[[], int],
        news: Callable[[LeaseUpdate], None],
        look: Callable[[], None],
        report: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._broker = broker
        self._consumer = consumer
        self._slots = slots
        self._leased = leased
        self._lease_s = lease_s
        self._offered = offered
        self._room = room
        self._news = news
        self._look = look
        self._report = report
        self._clock = clock
        self._is_stopping = threading.Event()
        self._renew_at = self._look_at = self._report_at = 0.0
        self.ticked = self._last_contact = clock()
        self._may_take_over_at = self.ticked + lease_s
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Begins."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Ends; what is held is no longer renewed."""
        self._is_stopping.set()
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_in_touch(self) -> bool:
        """Whether the broker answered lately."""
        return self._clock() - self._last_contact < _OUT_OF_TOUCH_S

    def tick(self) -> float:
        """Does what is due, and says for how many seconds nothing will be."""
        renew_every, look_every = self._lease_s / 3, min(0.5, self._lease_s / 4)
        now = self.ticked = self._clock()
        try:
            if now >= self._renew_at:
                self._renew()
                self._renew_at = now + renew_every
            if now >= self._look_at:
                self._look()
                self._take_over()
                self._adopt()
                self._look_at = now + look_every
            if now >= self._report_at:
                self._report()
                self._note_contact()
                self._report_at = now + 1.0
        except BrokerUnavailable as error:
            logger.warning("leases are not renewed: %s", error)
            return min(0.2, look_every)
        return max(0.0, min(self._renew_at, self._look_at, self._report_at) - self._clock())

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            self._is_stopping.wait(self.tick())

    def _note_contact(self) -> None:
        """The broker has answered. The first answer after a gap comes before anybody is taken over from."""
        now = self._clock()
        if self._is_after_gap:
            self._may_take_over_at = now + self._lease_s
        self._last_contact = now

    @property
    def _is_after_gap(self) -> bool:
        """Whether the broker has been silent for so long that the living may not have renewed, either."""
        return self._clock() - self._last_contact > self._lease_s / 2

    def _renew(self) -> None:
        held = self._leased.snapshot()
        if not held:
            return
        renewal = self._broker.renew(self._consumer, held)
        self._note_contact()
        if renewal.lost or renewal.cancelled:
            self._news(LeaseUpdate(renewal, []))

    def _take_over(self) -> None:
        for slot in self._slots():
            if (room := self._room()) <= 0:
                return
            # This very call may be the first to be answered after a gap.
            may_take_over = self._clock() >= self._may_take_over_at and not self._is_after_gap
            lease_ms = int(self._lease_s * 1000) if may_take_over else _RELEASED_MS
            found = self._broker.take_over(self._consumer, slot, lease_ms, room)
            self._note_contact()
            if found:
                logger.info("jobs taken over", extra={"model": slot, "jobs": len(found)})
                self._news(LeaseUpdate(_NOTHING, found))

    def _adopt(self) -> None:
        """Also while nothing is claimed, because what answers is being loaded: this keeps in touch with the broker."""
        for slot, offered in self._offered().items():
            if (room := min(self._room(), sum(offered.values()))) > 0:
                found = self._broker.adopt(self._consumer, slot, list(offered), room)
                self._note_contact()
                if found:
                    self._news(LeaseUpdate(_NOTHING, found))


_NOTHING: Final = Renewal(frozenset(), frozenset())
