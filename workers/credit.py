"""The bytes of jobs that a worker holds, shared by its models. Pure: no broker, no clock.

    credit = a share of each model, together one half + what any model may take, the other half

A model may always fill its share, so large jobs of one model never keep another one from claiming.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from penstock.registry.broker.base import Delivery
from penstock.registry.envelope import MAX_JOB_BYTES

__all__ = ["TURN_BYTES", "ByteCredit", "TakeOverRoom"]

TURN_BYTES: Final = 16 * 1024 * 1024
"""Results that one round trip carries to the broker, unless one result alone is larger."""
_MOST_AT_ONCE: Final = 8
"""Jobs of one call that takes over: the answer of Redis holds them all."""


class ByteCredit:
    """What the models may claim in one round trip. `held`: the bytes of the jobs in memory, by model.

    A grant is used up by whole jobs, so the last job of each claim may exceed it.

    >>> credit = ByteCredit(1000, ["a", "b"], {"a": 700})
    >>> credit.room("a"), credit.room("b"), credit.grant("a", others=1), credit.grant("b", others=0)
    (50, 300, 25, 275)
    """

    def __init__(self, most_bytes: int, models: Collection[str], held: Mapping[str, int]) -> None:
        self._held = held
        self._share = share = most_bytes // (2 * max(1, len(models)))
        free = most_bytes
        for model in models:
            nbytes = held.get(model, 0)
            free -= nbytes if nbytes > share else share
        self._free = max(0, free)
        """What no model holds beyond the shares."""

    def room(self, model: str) -> int:
        """The bytes that the model may still claim."""
        return max(0, self._share - self._held.get(model, 0)) + self._free

    def grant(self, model: str, others: int) -> int:
        """The bytes of one claim: what is left of the share, and an equal part of what is free.

        others: the models that claim afterwards in the same round trip. A claim uses up far less as a rule: it ends at
        CLAIM_BYTES. The sizes of jobs are known when they are claimed, so the broker takes as many in one step as fit
        the grant if all are the largest, and a small grant means many steps.
        """
        part = self._free // (others + 1)
        self._free -= part
        return max(0, self._share - self._held.get(model, 0)) + part


class TakeOverRoom(NamedTuple):
    """What the worker may take over now."""

    jobs: int
    nbytes: int

    @property
    def jobs_at_once(self) -> int:
        """Jobs of the next call. Their sizes are known afterwards, so they count as the largest."""
        return min(self.jobs, _MOST_AT_ONCE, max(1, self.nbytes // MAX_JOB_BYTES)) if self.nbytes > 0 else 0

    def without(self, found: Sequence[Delivery]) -> TakeOverRoom:
        """What is left beside these jobs."""
        return TakeOverRoom(self.jobs - len(found), self.nbytes - sum(len(delivery.sealed) for delivery in found))
