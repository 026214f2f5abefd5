"""The goldens of attached versions and the archive: read once after the load, written once a minute.

On the optimizer's thread. An archive that cannot be reached costs a warning, and the next try comes a minute later.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from math import inf
from typing import TYPE_CHECKING, Final

from penstock.registry.errors import PenstockError
from penstock.safety.golden_archive import GoldenArchive
from penstock.workers.levels.attached import AttachedVersion

if TYPE_CHECKING:
    from penstock.registry.catalog.goldens import GoldenOwner

__all__ = ["GoldenArchiving"]

logger = logging.getLogger("penstock.runtime")

_EVERY_S: Final = 60.0


class GoldenArchiving:
    """Keeps the samples of versions and the archive alike. clock: monotonic seconds. now: unix seconds."""

    def __init__(
        self, archive: GoldenArchive, clock: Callable[[], float], now: Callable[[], float] = time.time
    ) -> None:
        self._archive = archive
        self._clock = clock
        self._now = now
        self._stored: dict[GoldenOwner, set[str]] = {}
        """The digests that were read or written, by content."""
        self._next_at = -inf

    def step(self, attached: Iterable[AttachedVersion]) -> None:
        """Reads the samples of new versions; saves those of all versions when a minute has passed."""
        versions = [version for version in attached if version.profiler.goldens is not None]
        is_due = self._clock() >= self._next_at
        if not is_due and all(_owner(version) in self._stored for version in versions):
            return
        if is_due:
            self._next_at = self._clock() + _EVERY_S
        try:
            for version in versions:
                self._follow(version, is_due=is_due)
        except PenstockError as problem:
            logger.warning("reference samples could not be stored or read", extra={"reason": str(problem)})

    def _follow(self, version: AttachedVersion, *, is_due: bool) -> None:
        owner, store = _owner(version), version.profiler.goldens
        if store is None:
            return
        if owner not in self._stored:
            # First: a database that cannot be reached is asked again a minute later, and not at each step.
            self._stored[owner] = set()
            for golden in self._archive.load(owner):
                # As offered: what redaction keeps out today is not taken over from yesterday.
                store.offer(golden.job_id, golden.inputs, golden.outputs)
                self._stored[owner].add(golden.digest)
        if is_due:
            new = [golden for golden in store.goldens() if golden.digest not in self._stored[owner]]
            if new:
                self._archive.save(owner, new, int(self._now()))
                self._stored[owner] |= {golden.digest for golden in new}


def _owner(version: AttachedVersion) -> GoldenOwner:
    # Here: the module of the rows loads the database's library.
    from penstock.registry.catalog.goldens import GoldenOwner

    key = version.key
    return GoldenOwner(key.model, key.version, key.content_hash)
