"""The jobs in a worker's memory, and the leases on them.

    drain (I/O thread) -- takes, drops --> LeasedJobs <-- renews -- LeaseKeeper (a thread of its own)
                       <-- lost, cancelled, taken over, handed over --'

Only leases on jobs in memory are renewed: if a claimed job never arrived here, its lease lapses and it is delivered
again. If the broker was silent for a while, a worker waits one lease before it takes over jobs: the other live workers
could not renew either, and they renew first.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Final, NamedTuple

from penstock.registry.broker.base import Delivery, Held, Renewal, WorkerEnd
from penstock.registry.errors import BrokerUnavailable
from penstock.workers.credit import TakeOverRoom
from penstock.workers.job import ClaimedJob

__all__ = ["AGEING_SHARE", "LeaseKeeper", "LeaseUpdate", "LeasedJobs"]

AGEING_SHARE: Final = 1 / 8
"""The share of claims that is reserved for lower priorities that have waited too long."""
_RELEASED_MS: Final = 3_600_000
"""Released jobs look idle for a day. A lease that lapsed by itself never stays idle for an hour."""
_REPORT_EVERY_S: Final = 1.0
_OUT_OF_TOUCH_S: Final = 3.0
"""After this time without an answer the broker counts as away."""
_TELL_EVERY_S: Final = 10.0
"""Between two log lines while the broker is away. One that refuses a password answers five times a second."""

logger = logging.getLogger("penstock.server")


class LeasedJobs:
    """The jobs in this worker's memory, by entry. Thread-safe."""

    def __init__(self) -> None:
        # An entry id is unique in its stream: only slot, priority and entry id together name one job.
        self._held: dict[tuple[str, int, bytes], ClaimedJob] = {}
        self._sizes: defaultdict[str, int] = defaultdict(int)
        self.nbytes = 0
        """The bytes of all sealed jobs in memory now."""
        self._lock = threading.Lock()

    def take(self, jobs: Sequence[ClaimedJob]) -> None:
        """Note that these jobs are in memory now."""
        with self._lock:
            for job in jobs:
                delivery = job.delivery
                slot = delivery.slot
                key = slot, delivery.priority, delivery.entry_id
                if key not in self._held:
                    nbytes = len(delivery.sealed)
                    self._sizes[slot] += nbytes
                    self.nbytes += nbytes
                self._held[key] = job

    def drop(self, jobs: Sequence[ClaimedJob]) -> None:
        """Note that these jobs are not in memory any more."""
        with self._lock:
            for job in jobs:
                delivery = job.delivery
                slot = delivery.slot
                if self._held.pop((slot, delivery.priority, delivery.entry_id), None) is not None:
                    nbytes = len(delivery.sealed)
                    self._sizes[slot] -= nbytes
                    self.nbytes -= nbytes

    def snapshot(self) -> list[Held]:
        """The jobs in memory now."""
        with self._lock:
            jobs = list(self._held.values())
        return [job.held for job in jobs]

    def __len__(self) -> int:
        return len(self._held)

    @property
    def sizes(self) -> Mapping[str, int]:
        """The bytes of the sealed jobs in memory now, by model."""
        return self._sizes


class LeaseUpdate(NamedTuple):
    """Changes that the lease keeper found: lost entries, cancelled jobs, and jobs taken over from other workers."""

    renewal: Renewal
    taken_over: list[Delivery]


class LeaseKeeper:
    """Renews leases, takes over lapsed ones and handed-over jobs, and calls `report` once a second, on its own thread.

    slots: the models whose jobs may be taken over. offered: by model, the versions for which jobs may be handed over to
    this worker, with their number. room: what may be taken over now. on_update: called with each
    update, on this thread. look: called before each search for jobs to take over. clock: monotonic seconds.
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
        room: Callable[[], TakeOverRoom],
        on_update: Callable[[LeaseUpdate], None],
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
        self._on_update = on_update
        self._look = look
        self._report = report
        self._clock = clock
        self._is_stopping = threading.Event()
        self._renew_at = self._look_at = self._report_at = self._tell_at = 0.0
        self.ticked = self._last_contact = clock()
        self._may_take_over_at = self.ticked + lease_s
        self._thread = threading.Thread(target=self._run, name="leases", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the thread: no lease is renewed any more."""
        self._is_stopping.set()
        self._thread.join(timeout_s)

    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    @property
    def is_in_touch(self) -> bool:
        """Whether the broker has answered in the last seconds."""
        return self._clock() - self._last_contact < _OUT_OF_TOUCH_S

    def tick(self) -> float:
        """Do the steps that are due; returns the seconds until the next one."""
        renew_every, look_every = self._lease_s / 3, min(0.5, self._lease_s / 4)
        now = self.ticked = self._clock()
        # What is due soon is done now, too: the thread would only wake up once more for it.
        soon = now + look_every / 2
        try:
            if soon >= self._renew_at and len(self._leased):
                self._renew()
                self._renew_at = now + renew_every
            if soon >= self._look_at:
                self._look()
                self._take_over()
                self._adopt()
                self._look_at = now + look_every
            if soon >= self._report_at:
                self._report()
                self._note_contact()
                self._report_at = now + _REPORT_EVERY_S
                self._tell_at = 0.0
        except BrokerUnavailable as error:
            if now >= self._tell_at:
                logger.warning("leases are not renewed: %s", error)
                self._tell_at = now + _TELL_EVERY_S
            return min(0.2, look_every)
        # A job that comes meanwhile is renewed at the next look, if none was held for so long.
        renew_at = self._renew_at if len(self._leased) else inf
        return max(0.0, min(renew_at, self._look_at, self._report_at) - self._clock())

    def _run(self) -> None:
        while not self._is_stopping.is_set():
            self._is_stopping.wait(self.tick())

    def _note_contact(self) -> None:
        """Note that the broker has answered. After a gap, the next take-over is one lease later."""
        now = self._clock()
        if self._is_after_gap(now):
            self._may_take_over_at = now + self._lease_s
        self._last_contact = now

    def _is_after_gap(self, now: float) -> bool:
        """Whether the broker was silent for so long that other live workers may not have renewed their leases."""
        return now - self._last_contact > self._lease_s / 2

    def _renew(self) -> None:
        held = self._leased.snapshot()
        renewal = self._broker.renew(self._consumer, held)
        self._note_contact()
        if renewal.lost or renewal.cancelled:
            self._on_update(LeaseUpdate(renewal, []))

    def _take_over(self) -> None:
        for slot in self._slots():
            found = self._taken_within(self._room(), partial(self._take_over_some, slot))
            if found:
                logger.info("jobs taken over", extra={"model": slot, "jobs": len(found)})
                self._on_update(LeaseUpdate(_NOTHING, found))

    def _take_over_some(self, slot: str, count: int) -> list[Delivery]:
        # Checked for each call: this one may be the first that is answered after a gap.
        now = self._clock()
        may_take_over = now >= self._may_take_over_at and not self._is_after_gap(now)
        lease_ms = int(self._lease_s * 1000) if may_take_over else _RELEASED_MS
        return self._broker.take_over(self._consumer, slot, lease_ms, count)

    def _taken_within(self, room: TakeOverRoom, take: Callable[[int], list[Delivery]]) -> list[Delivery]:
        """The jobs of as many calls as find any and have room: one call takes no more than surely fit."""
        found: list[Delivery] = []
        while (count := room.jobs_at_once) > 0:
            some = take(count)
            self._note_contact()
            found += some
            if len(some) < count:
                break
            room = room.without(some)
        return found

    def _adopt(self) -> None:
        """Take over handed-over jobs. Runs also while no model is claimable, to stay in touch with the broker."""
        for slot, offered in self._offered().items():
            room = self._room()
            room = TakeOverRoom(min(room.jobs, sum(offered.values())), room.nbytes)
            if found := self._taken_within(room, partial(self._broker.adopt, self._consumer, slot, list(offered))):
                self._on_update(LeaseUpdate(_NOTHING, found))


_NOTHING: Final = Renewal(frozenset(), frozenset())
