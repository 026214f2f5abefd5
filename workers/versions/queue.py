"""The jobs of one version in this worker: how many may be here, and how large their batches may be.

add --> Batcher --> batches, no larger than the limits, the controller and the memory cap allow
reserve, release: jobs that wait or run;  in_flight: batches on the model threads
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from typing import Final

from penstock.workers.batching.batcher import Batch, Batcher, BatchLimits, Pending
from penstock.workers.batching.controller import LatencyController
from penstock.workers.batching.forward_size import ForwardSize
from penstock.workers.credit import TURN_BYTES
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.policy import VersionPolicy

__all__ = ["INTERRUPTED_S", "VersionQueue"]

logger = logging.getLogger("penstock.server")

_BATCHES_HELD: Final = 2
"""One batch runs and one is ready. A model that sorts by length holds its window as well."""
_CAP_HOLDS_S: Final = 300.0
"""A memory cap is doubled after this time without a batch that did not fit."""
_AHEAD_S: Final = 0.02
_MOST_AHEAD: Final = 16
"""Jobs that a version with small batches and short forwards may have here, and for how long they keep it busy."""
_SHORTEST_S: Final = 0.0001
_SHORT_S: Final = 0.002
"""The broker takes about as long for the results of a full batch."""
INTERRUPTED_S: Final = 0.02
"""A short forward may take so long once: the system stops any thread for a few turns of other processes."""
_UNKNOWN_FORWARD_S: Final = 1.0
_FADING: Final = 0.75
_RECENT: Final = 8
_LONGEST_ROW: Final = 8192
"""A token cap above full batches of rows of this length limits nothing."""


class VersionQueue:
    """The batcher of one version, its capacity and its memory cap. The I/O thread owns it."""

    def __init__(self, name: str, policy: VersionPolicy) -> None:
        self.name: Final = name
        """The model's, for log lines."""
        self.policy = policy
        self.in_memory = 0
        """Jobs that wait or run; without followers of an equal job, and without delayed jobs."""
        self._priorities: Counter[int] = Counter()
        """How many of them have each priority."""
        self.in_flight = 0
        """Batches handed to the model threads."""
        self.unsent_bytes = 0
        """Results of ended batches that are not on their way to the broker yet; only those of large batches count."""
        self.longest_forward_s = _UNKNOWN_FORWARD_S
        """The longest forward of late; each later batch lowers it by a quarter."""
        self._recent_s = deque([_UNKNOWN_FORWARD_S] * _RECENT, _RECENT)
        self.usual_forward_s = _UNKNOWN_FORWARD_S
        """The longest of the last eight forwards but one: the system stops any thread now and then."""
        self.runs_on_io_thread = False
        """Whether the last batch was one for the I/O thread, which runs it while the broker takes results. Then a third
        batch may be here: one whose results are on their way, one that runs, and one that comes with the answer."""
        self.row_bytes = policy.result_row_bytes
        """Bytes of outputs that one row is expected to have; 0: nothing is known before the first batch."""
        self._set_limits(policy.limits)

    def _set_limits(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.batcher: Batcher[ClaimedJob] = Batcher(limits)
        window = limits.max_rows * limits.sort_window if limits.sort_window > 1 else 0
        policy = self.policy
        # A generation engine has seats: a job that waits here could run in another worker.
        held = policy.concurrency if policy.seats else limits.max_rows * _BATCHES_HELD * policy.concurrency + window
        self.capacity = held
        """Jobs that may wait or run here."""
        self._controller = (
            LatencyController(self.policy.target_latency_s, limits.max_rows, limits.max_wait_s)
            if limits.max_rows > 1
            else None
        )
        self.max_rows = limits.max_rows
        """Rows of the largest batch that the memory cap allows."""
        self._max_tokens = 0
        """Padded tokens that the memory cap allows; 0: no cap."""
        self.raise_cap_at = inf
        """When `raise_cap` doubles the cap, in monotonic seconds."""

    def resize(self, max_rows: int) -> None:
        """Form batches of up to `max_rows` rows from now on. Pending jobs stay pending."""
        pending = self.batcher.discard(lambda _: True)
        self._set_limits(replace(self.limits, max_rows=max_rows))
        self.batcher.extend(pending)

    def follow(self, policy: VersionPolicy) -> None:
        """Keep to another policy from the next batch on, with batches of as many rows. Pending jobs stay pending."""
        self.policy = policy
        pending, cap = self.batcher.discard(lambda _: True), (self.max_rows, self._max_tokens, self.raise_cap_at)
        is_capped = self.is_capped
        self._set_limits(replace(policy.limits, max_rows=self.limits.max_rows))
        if is_capped:
            # The device has no more memory than before.
            self.max_rows, self._max_tokens, self.raise_cap_at = cap
            self.batcher.narrow(*cap[:2])
        self.batcher.extend(pending)

    @property
    def has_large_results(self) -> bool:
        """Whether a full batch may have more results than one round trip carries."""
        return self.row_bytes * self.limits.max_rows > TURN_BYTES

    def expected_bytes(self, job: ClaimedJob) -> int:
        """The job as it came, and the outputs that it is expected to have."""
        return len(job.delivery.sealed) + job.rows * self.row_bytes

    def note_forward(self, seconds: float) -> None:
        """A forward took so long."""
        self.longest_forward_s = max(seconds, self.longest_forward_s * _FADING)
        self._recent_s.append(seconds)
        self.usual_forward_s = sorted(self._recent_s)[-2]

    def forget_forwards(self) -> None:
        """The model was loaded: nothing is known of its forwards."""
        self.longest_forward_s = self.usual_forward_s = _UNKNOWN_FORWARD_S
        self._recent_s.extend([_UNKNOWN_FORWARD_S] * _RECENT)

    def learn_results(self, batch: Batch[ClaimedJob], output_bytes: int) -> None:
        """Bound the next batches by the results of this one. The expectation grows at once and shrinks slowly."""
        seen, before = output_bytes // max(1, batch.rows), self.row_bytes
        self.row_bytes = max(seen, before * 7 // 8)
        if self.row_bytes > before and self.has_large_results:
            pending = self.batcher.discard(lambda _: True)
            for item in pending:
                item.nbytes = self.expected_bytes(item.job)
            self.batcher.extend(pending)

    @property
    def has_short_forwards(self) -> bool:
        """Whether the forwards of late were short, but for one."""
        return self.usual_forward_s < _SHORT_S and self.longest_forward_s < INTERRUPTED_S

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return self.in_flight == 0 and len(self.batcher) == 0

    @property
    def is_empty(self) -> bool:
        """Whether no job is here at all: none waits or runs, and no answer to one is looked up."""
        return self.is_idle and self.in_memory == 0

    @property
    def free(self) -> int:
        """Jobs that may still come in.

        Of a version with small batches and short forwards, a claim brings the jobs of the next 20 ms: one claim for
        each small batch would cost more than its forward.
        """
        most = self.policy.seats or self.capacity + self.runs_on_io_thread * self.limits.max_rows
        if self.in_memory >= most:
            return 0
        if most < _MOST_AHEAD and not self.policy.seats:
            rows = self.limits.max_rows * self.policy.concurrency
            ahead = int(_AHEAD_S / max(self.usual_forward_s, _SHORTEST_S)) * rows
            most = max(most, min(_MOST_AHEAD, ahead))
        return most - self.in_memory

    @property
    def free_for_urgent(self) -> tuple[int, int]:
        """Jobs that may come in though no seat is free, and how many of the priorities they may have.

        They are more urgent than a job that is here.
        """
        free, least = self.capacity - self.in_memory, max(self._priorities, default=0)
        return (free, least) if self.policy.seats and free > 0 and least > 0 else (0, 0)

    def reserve(self, job: ClaimedJob) -> None:
        """The job waits or runs here."""
        if not job.takes_room:
            self._enter(job)

    def release(self, job: ClaimedJob) -> None:
        """The job no longer waits or runs here."""
        if job.takes_room:
            self._leave(job)

    def release_all(self, jobs: Iterable[ClaimedJob]) -> None:
        """These jobs no longer wait or run here."""
        for job in jobs:
            if job.takes_room:
                self._leave(job)

    def add(self, pending: Sequence[Pending[ClaimedJob]]) -> None:
        """Put jobs before the batcher, in their order of arrival."""
        for item in pending:
            job = item.job
            if not job.takes_room:
                self._enter(job)
        self.batcher.extend(pending)

    def _enter(self, job: ClaimedJob) -> None:
        job.takes_room = True
        self.in_memory += 1
        if self.policy.seats:
            self._priorities[int(job.delivery.priority)] += 1

    def _leave(self, job: ClaimedJob) -> None:
        job.takes_room = False
        self.in_memory -= 1
        if self.policy.seats:
            priority = int(job.delivery.priority)
            self._priorities[priority] -= 1
            if not self._priorities[priority]:
                del self._priorities[priority]

    def put_back(self, batch: Batch[ClaimedJob]) -> None:
        """Dissolve a batch that has not begun."""
        self.batcher.put_back(batch)
        self.in_flight -= 1

    def observe(self, batch: Batch[ClaimedJob], forward_s: float, totals_s: list[float], now: float) -> None:
        """Steer the next batches by a committed one. totals_s: seconds of each job, from its acceptance on."""
        if self._controller is not None:
            self._controller.observe(batch, forward_s, totals_s, len(self.batcher), now)
            self.batcher.steer(self._controller.rows, self._controller.wait_s)

    def cap_batches(self, too_large: ForwardSize, now: float) -> None:
        """Cap batches at half of a forward that did not fit the device.

        The cap counts tokens where forwards have tokens: short texts may still come in full batches.
        """
        rows, tokens = self.max_rows, self._max_tokens
        if too_large.padded_tokens:
            tokens = min(tokens or too_large.padded_tokens, max(1, too_large.padded_tokens // 2))
        else:
            rows = min(rows, max(1, too_large.rows // 2))
        self._set_cap(rows, tokens, now)
        logger.warning("batches are capped", extra={"model": self.name, "max_rows": rows, "max_tokens": tokens})

    def raise_cap(self, now: float) -> None:
        """Double a cap that has held: other users of the device may have left it."""
        if now >= self.raise_cap_at:
            tokens = 0 if self._max_tokens > self.limits.max_rows * _LONGEST_ROW else self._max_tokens * 2
            self._set_cap(min(self.limits.max_rows, self.max_rows * 2), tokens, now)

    def _set_cap(self, rows: int, tokens: int, now: float) -> None:
        self.max_rows, self._max_tokens = rows, tokens
        self.raise_cap_at = now + _CAP_HOLDS_S if self.is_capped else inf
        self.batcher.narrow(rows, tokens)

    @property
    def is_capped(self) -> bool:
        """Whether device memory keeps batches smaller than the limits allow."""
        return (self.max_rows, self._max_tokens) != (self.limits.max_rows, 0)
