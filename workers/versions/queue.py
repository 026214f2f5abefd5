"""The jobs of one version in this worker: how many may be here, and how large their batches may be.

add --> Batcher --> batches, no larger than the limits, the controller and the memory cap allow
reserve, release: jobs that wait or run;  in_flight: batches on the model threads
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from typing import Final

from penstock.workers.batching.batcher import Batch, Batcher, Pending
from penstock.workers.batching.controller import LatencyController
from penstock.workers.batching.forward_size import ForwardSize
from penstock.workers.job import ClaimedJob
from penstock.workers.versions.policy import VersionPolicy

__all__ = ["VersionQueue"]

logger = logging.getLogger("penstock.server")

_BATCHES_HELD: Final = 2
"""One batch runs and one is ready. A model that sorts by length holds its window as well."""
_CAP_HOLDS_S: Final = 300.0
"""A memory cap is doubled after this time without a batch that did not fit."""
_LONGEST_ROW: Final = 8192
"""A token cap above full batches of rows of this length limits nothing."""


class VersionQueue:
    """The batcher of one version, its capacity and its memory cap. The I/O thread owns it."""

    def __init__(self, name: str, policy: VersionPolicy) -> None:
        self.name: Final = name
        """The model's, for log lines."""
        self.policy: Final = policy
        self.in_memory = 0
        """Jobs that wait or run; without followers of an equal job, and without delayed jobs."""
        self.in_flight = 0
        """Batches handed to the model threads."""
        self.limits = policy.limits
        self._set_limits(policy.limits.max_rows)

    def _set_limits(self, max_rows: int) -> None:
        limits = self.limits = replace(self.limits, max_rows=max_rows)
        self.batcher: Batcher[ClaimedJob] = Batcher(limits)
        window = limits.max_rows * limits.sort_window if limits.sort_window > 1 else 0
        self.capacity = limits.max_rows * _BATCHES_HELD * self.policy.concurrency + window
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
        self._raise_cap_at = inf

    def resize(self, max_rows: int) -> None:
        """Form batches of up to `max_rows` rows from now on. Pending jobs stay pending."""
        pending = self.batcher.discard(lambda _: True)
        self._set_limits(max_rows)
        self.batcher.extend(pending)

    @property
    def is_idle(self) -> bool:
        """Whether no job waits or runs."""
        return self.in_flight == 0 and len(self.batcher) == 0

    @property
    def free(self) -> int:
        """Jobs that may still come in."""
        return max(0, self.capacity - self.in_memory)

    def reserve(self, job: ClaimedJob) -> None:
        """The job waits or runs here."""
        self.in_memory += not job.takes_room
        job.takes_room = True

    def release(self, job: ClaimedJob) -> None:
        """The job no longer waits or runs here."""
        self.in_memory -= job.takes_room
        job.takes_room = False

    def add(self, pending: Sequence[Pending[ClaimedJob]]) -> None:
        """Put jobs before the batcher, in their order of arrival."""
        for item in pending:
            self.reserve(item.job)
        self.batcher.extend(pending)

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
        if now >= self._raise_cap_at:
            tokens = 0 if self._max_tokens > self.limits.max_rows * _LONGEST_ROW else self._max_tokens * 2
            self._set_cap(min(self.limits.max_rows, self.max_rows * 2), tokens, now)

    def _set_cap(self, rows: int, tokens: int, now: float) -> None:
        self.max_rows, self._max_tokens = rows, tokens
        self._raise_cap_at = now + _CAP_HOLDS_S if self.is_capped else inf
        self.batcher.narrow(rows, tokens)

    @property
    def is_capped(self) -> bool:
        """Whether device memory keeps batches smaller than the limits allow."""
        return (self.max_rows, self._max_tokens) != (self.limits.max_rows, 0)
