"""How this worker gets jobs: one claim in every commit while there is work, one blocking claim while there is none.

wanted --> exchange: commits and claims, one round trip --> deliveries
arm    --> a blocking claim is left with the broker     --> wait: its answer wakes the I/O thread
"""

from __future__ import annotations

import os
import select
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from penstock.registry.broker.base import Claim, Commit, CommitStatus, Delivery, WorkerEnd
from penstock.registry.envelope import MAX_JOB_BYTES
from penstock.registry.queues import Priority
from penstock.workers.credit import ByteCredit
from penstock.workers.leases import AGEING_SHARE, LeasedJobs
from penstock.workers.process.descriptors import moved_up
from penstock.workers.versions.version import ServedModel

__all__ = ["AgeingReserve", "Claimer", "WakeUp"]

_BLOCK_MS: Final = 1000
_LOST_S: Final = 0.01
_ANSWER_S: Final = 0.25
"""A blocking claim is overdue when it has not answered for so long after its time."""


class AgeingReserve:
    """How many of the next jobs are kept for lower priorities: over time AGEING_SHARE of them, also one by one.

    >>> share = AgeingReserve()
    >>> sum(share.of(1) for _ in range(16))
    2
    """

    def __init__(self) -> None:
        self._owed = 0.0

    def of(self, credit: int) -> int:
        """The reserve within `credit`."""
        self._owed += credit * AGEING_SHARE
        reserved = min(int(self._owed), credit)
        self._owed -= reserved
        return reserved


class WakeUp:
    """The sleep of the I/O thread. Any thread may end it by `ring`; the I/O thread calls the other methods."""

    def __init__(self) -> None:
        self.fd = moved_up(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
        self.is_lost = False
        """Whether a model closed the descriptor: the process is about to be replaced."""
        self._pollers: dict[int, select.poll] = {}
        # Close it only after the last thread has released this object: a hung thread may still write to it.
        weakref.finalize(self, os.close, self.fd).atexit = False

    def ring(self) -> None:
        """Wake the I/O thread now, or keep it from its next sleep."""
        try:
            os.eventfd_write(self.fd, 1)
        except OSError:
            self.is_lost = True

    def clear(self) -> None:
        """The I/O thread is awake."""
        try:
            os.eventfd_read(self.fd)
        except OSError:
            self.is_lost = True

    def sleep(self, answer_fd: int, timeout_s: float) -> bool:
        """Sleep until a ring, until `answer_fd` is readable (-1: none), or for `timeout_s` seconds.

        Returns whether `answer_fd` is readable.
        """
        if self.is_lost:
            # What is left to commit is committed; each poll would return at once.
            time.sleep(min(timeout_s, _LOST_S))
        has_answer = False
        for fd, _ in self._poller(answer_fd).poll(timeout_s * 1000):
            if fd == self.fd:
                self.clear()
            else:
                has_answer = True
        return has_answer

    def forget_descriptors(self) -> None:
        """The numbers that `sleep` was called with may stand for other files from now on."""
        self._pollers.clear()

    def _poller(self, answer_fd: int) -> select.poll:
        """What to sleep on: the own descriptor and, unless it is -1, the other one."""
        poller = self._pollers.get(answer_fd)
        if poller is None:
            poller = self._pollers[answer_fd] = select.poll()
            poller.register(self.fd, select.POLLIN)
            if answer_fd >= 0:
                poller.register(answer_fd, select.POLLIN)
        return poller


class Claimer:
    """The claims of one consumer. The I/O thread owns it.

    models: by name. most_jobs, most_bytes: what this worker holds in memory at most; see ByteCredit. ageing_ms: after
    this wait a job of a lower priority counts for the reserve. checkpoint: called at each point where a crash is worth
    testing. clock: monotonic seconds.
    """

    def __init__(
        self,
        broker: WorkerEnd,
        consumer: str,
        models: Mapping[str, ServedModel],
        leased: LeasedJobs,
        wake_up: WakeUp,
        *,
        most_jobs: int,
        most_bytes: int,
        ageing_ms: int,
        result_ttl_ms: int,
        checkpoint: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        self.wake_up: Final = wake_up
        self._broker = broker
        self._consumer = consumer
        self._models = models
        self._leased = leased
        self._most_jobs = most_jobs
        self._most_bytes = most_bytes
        self._ageing_ms = ageing_ms
        self._result_ttl_ms = result_ttl_ms
        self._checkpoint = checkpoint
        self._clock = clock
        self._reserve = AgeingReserve()
        self._empty: set[str] = set()
        """Models whose last claim found fewer jobs than it asked for."""
        self._largest = 0
        """Bytes of the largest job of late; 0: none came yet."""
        self._turn = 0
        """Which model takes of the room first."""
        self.is_armed = False
        """Whether a blocking claim is with the broker."""
        self.has_just_waited = False
        """Whether the blocking claim has brought jobs, and nothing was claimed since."""
        self.has_widened = False
        """Whether a blocking claim of urgent jobs was withdrawn, and others were not asked for since."""
        self._armed_count = 0
        self._armed_until = 0.0
        self._armed_bands: dict[str, int] = {}
        """The models without a seat or pages, of which it claims so many of the most urgent priorities."""

    # While there is work

    def wanted(self) -> list[Claim]:
        """What to claim now. Nothing after every queue was seen empty: the blocking claim will tell."""
        self.has_widened = False
        if self.is_armed or self._is_quiet(narrowly=True):
            return []
        return self.claims_for(self._models.values())

    def claims_for(self, models: Iterable[ServedModel]) -> list[Claim]:
        """Claims of these models within the room of the worker."""
        room, credit_bytes = self._most_jobs - len(self._leased), self._byte_credit()
        claims = []
        # In turn: a model with room for all that the worker can take would leave the others nothing, for ever.
        turns = deque(models)
        turns.rotate(-self._turn)
        self._turn += 1
        for others, model in zip(range(len(turns) - 1, -1, -1), turns, strict=True):
            credit, bands = min(model.free, room), len(Priority)
            if credit <= 0:
                free, bands = model.free_for_urgent
                credit = min(free, room)
            if credit > 0 and (nbytes := credit_bytes.grant(model.name, others)) > 0:
                room -= credit
                claims.append(self.claim_of(model.name, credit, nbytes, bands))
        return claims

    def claim_of(self, model: str, credit: int, nbytes: int, bands: int = len(Priority)) -> Claim:
        """A claim of up to `credit` jobs and `nbytes` bytes, of the `bands` most urgent priorities."""
        expected_bytes = self._largest or MAX_JOB_BYTES
        return Claim(model, credit, self._reserve.of(credit), self._ageing_ms, nbytes, expected_bytes, bands)

    def _byte_credit(self) -> ByteCredit:
        return ByteCredit(self._most_bytes, self._models, self._leased.sizes)

    def exchange(
        self, commits: Sequence[Commit], claims: Sequence[Claim], meanwhile: Callable[[], None] | None = None
    ) -> tuple[Sequence[CommitStatus], list[Delivery]]:
        """Commit and claim in one round trip. meanwhile: called while the broker works.

        Raises BrokerUnavailable; then the outcome of the commits and claims is unknown.
        """
        if commits:
            self._checkpoint("before-commit")
        if claims:
            self._checkpoint("before-claim")
            self.has_just_waited = False
        statuses, deliveries = self._broker.exchange(self._consumer, commits, claims, self._result_ttl_ms, meanwhile)
        if commits:
            self._checkpoint("after-commit")
        self._note_found(claims, deliveries)
        return statuses, deliveries

    # While there is none

    def arm(self, *, may_be_narrow: bool = True) -> None:
        """Leave a blocking claim for all queues with the broker, once all were seen empty.

        While one of them has more jobs than this worker can take, every commit carries the next claims of all. If it
        `may_be_narrow`, it takes of an engine without a seat or pages the jobs that are more urgent than one that is
        here.
        """
        if self.is_armed or not self._is_quiet(narrowly=may_be_narrow):
            return
        room = self._most_jobs - len(self._leased)
        slots = [name for name, model in self._models.items() if model.is_claimable]
        credit_bytes = self._byte_credit()
        nbytes = min((credit_bytes.room(slot) for slot in slots), default=0)
        if room <= 0 or nbytes <= 0:
            return
        # The count holds for each of the queues, and several may answer at once; one job of each is always welcome.
        # It bounds the bytes, too, by the largest job of late, or of all before the first one came. The first call that
        # publishes ends a blocking claim, but the jobs may come between the last claim and this one.
        share = min(room, nbytes // (self._largest or MAX_JOB_BYTES)) // (len(slots) * len(Priority))
        urgent = {slot: self._models[slot].free_for_urgent for slot in slots if self._models[slot].free <= 0}
        rooms = [free // bands for free, bands in urgent.values()]
        count = max(1, min([share, *rooms, *(self._models[slot].free for slot in slots if slot not in urgent)]))
        self._checkpoint("before-claim")
        self.has_widened = False
        self._armed_count = count
        self._armed_bands = {slot: bands for slot, (_, bands) in urgent.items()}
        # What comes for them meanwhile is not seen.
        self._empty.difference_update(urgent)
        self._broker.arm(self._consumer, slots, count, _BLOCK_MS, self._armed_bands)
        self.is_armed = True
        self._armed_until = self._clock() + _BLOCK_MS / 1000 + _ANSWER_S

    def wait(self, timeout_s: float) -> list[Delivery]:
        """Sleep until the blocking claim has an answer, until `wake_up` rings, or for `timeout_s` seconds."""
        has_answer = self.wake_up.sleep(self._broker.fileno() if self.is_armed else -1, timeout_s)
        if has_answer or (self.is_armed and self._clock() >= self._armed_until):
            return self._collect()
        return []

    def _collect(self) -> list[Delivery]:
        """The blocking claim has an answer or is overdue: on a half-open connection none may ever come."""
        deliveries = self._broker.collect() if self._clock() < self._armed_until else self._broker.disarm()
        self.is_armed = False
        self.has_just_waited = bool(deliveries)
        bands, every = self._armed_bands, len(Priority)
        self._note_found(
            [Claim(name, self._armed_count, 0, 0, bands=bands.get(name, every)) for name in self._models], deliveries
        )
        return deliveries

    def widen(self) -> list[Delivery]:
        """Withdraw a blocking claim of urgent jobs once other jobs are to be claimed; returns what it had claimed."""
        if self.is_armed:
            for name, bands in self._armed_bands.items():
                model = self._models[name]
                if model.free > 0 or model.free_for_urgent[1] != bands:
                    self.has_widened = True
                    return self.disarm()
        return []

    def disarm(self) -> list[Delivery]:
        """Withdraw the blocking claim; returns what it had claimed."""
        if not self.is_armed:
            return []
        self.is_armed = False
        return self._broker.disarm()

    def reset(self) -> None:
        """The connection is gone, and the blocking claim with it."""
        self._broker.drop_armed()
        self.wake_up.forget_descriptors()
        self.is_armed = False

    def next_wakeup(self) -> float:
        """When the blocking claim is overdue, in monotonic seconds."""
        return self._armed_until

    @property
    def awaits_pages(self) -> bool:
        """Whether the blocking claim leaves out jobs that an engine may soon have pages for."""
        return any(self._models[name].awaits_pages for name in self._armed_bands)

    # What was found

    @property
    def has_room(self) -> bool:
        """Whether any model may get more jobs now, or as soon as its engine has pages for them."""
        if self._most_jobs <= len(self._leased):
            return False
        credit_bytes = self._byte_credit()
        return any(
            (model.free > 0 or model.free_for_urgent[0] > 0 or model.awaits_pages) and credit_bytes.room(name) > 0
            for name, model in self._models.items()
        )

    @property
    def may_wait(self) -> bool:
        """Whether the worker has room for a job of each model: then it claims at once, or leaves a blocking claim."""
        if self._most_jobs <= len(self._leased):
            return False
        credit_bytes = self._byte_credit()
        return all(credit_bytes.room(name) > 0 for name, model in self._models.items() if model.is_claimable)

    def _is_quiet(self, *, narrowly: bool) -> bool:
        """Whether every queue was seen empty, with room for more: time to wait instead of asking.

        narrowly: a model that has room for urgent jobs only is no reason to ask, either.
        """
        # Called twice in every turn. A generator would take twice as long.
        for name, model in self._models.items():
            if not model.is_claimable:
                continue
            if model.free > 0:
                if name not in self._empty:
                    return False
            elif not (narrowly and model.free_for_urgent[0] > 0):
                return False
        return True

    def _note_found(self, claims: Sequence[Claim], deliveries: Sequence[Delivery]) -> None:
        # A claim of urgent jobs only has not seen its queue empty.
        claims = [claim for claim in claims if claim.bands == len(Priority)]
        if not deliveries:
            self._empty.update(claim.slot for claim in claims)
            return
        found: dict[str, int] = {}
        for delivery in deliveries:
            found[delivery.slot] = found.get(delivery.slot, 0) + 1
        sizes = [len(delivery.sealed) for delivery in deliveries]
        nbytes = sum(sizes)
        self._largest = max(self._largest * 7 // 8, *sizes)
        for claim in claims:
            # The bytes of all models: a claim that may have ended for want of bytes has not seen its queue empty.
            if found.get(claim.slot, 0) < claim.credit and nbytes < claim.credit_bytes:
                self._empty.add(claim.slot)
            else:
                self._empty.discard(claim.slot)
