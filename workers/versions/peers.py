"""Who else has a version that is not to be had here, as the live workers say it in their reports.

    a job names a version --> label_of: the label under which another worker has it, or may load it for the job
                          `-> is_nowhere: nobody has it, and not only since a moment ago

Reports are read at most once a second, and only while some job asks for one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from math import inf
from typing import Final

import msgspec

from penstock.registry.broker.base import Broker
from penstock.registry.errors import BrokerUnavailable
from penstock.workers.versions.version import is_name_of

__all__ = ["Peers"]

logger = logging.getLogger("penstock.server")

_LOOK_EVERY_S: Final = 1.0
_SURE_AFTER_S: Final = 3.0
"""A worker reports once a second, and after an outage of the broker it may take two to come back."""
_UNWATCHED_S: Final = 2.5
"""After so long without a look, what was missing before says nothing."""
_MOST_REMEMBERED: Final = 1000


class _Version(msgspec.Struct):
    content_hash: str = ""
    is_offered: bool = False


class _Report(msgspec.Struct):
    name: str = ""
    ready: bool = False
    models: dict[str, str] = {}
    versions: dict[str, dict[str, _Version]] = {}


_decode: Final = msgspec.json.Decoder(_Report).decode


class Peers:
    """The workers of this broker but the one called `worker`. One thread's. clock: monotonic seconds."""

    def __init__(self, broker: Broker, worker: str, clock: Callable[[], float]) -> None:
        self._broker = broker
        self._worker = worker
        self._clock = clock
        self._looked = -inf
        self._offered: dict[str, dict[str, set[str]]] = {}
        """Model -> label -> content hashes."""
        self._missing: dict[tuple[str, str], float] = {}
        """What was asked for and nobody had, and since when."""

    def look(self) -> None:
        """Reads the reports, unless that was a moment ago. While they cannot be read nobody is known to have anything,
        and nothing is sure to be nowhere."""
        now = self._clock()
        if now - self._looked < _LOOK_EVERY_S:
            return
        if now - self._looked > _UNWATCHED_S:
            self._missing.clear()
        self._looked = now
        self._offered = {}
        try:
            reports = [_opened(report) for report in self._broker.workers()]
        except BrokerUnavailable as error:
            # Not the caller's end: a worker that may not read them goes on with all other jobs.
            logger.warning("other workers cannot be asked what they have: %s", error)
            self._missing.clear()
            return
        for report in reports:
            if report.ready and report.name != self._worker:
                for name, versions in report.versions.items():
                    self._note(name, versions)
        self._missing = {
            (name, wanted): since for (name, wanted), since in self._missing.items() if not self._find(name, wanted)
        }

    def _note(self, name: str, versions: dict[str, _Version]) -> None:
        labels = self._offered.setdefault(name, {})
        for label, version in versions.items():
            if version.is_offered:
                labels.setdefault(label, set()).add(version.content_hash)

    def _find(self, model: str, wanted: str) -> str:
        for label, hashes in self._offered.get(model, {}).items():
            if any(is_name_of(wanted, label, content_hash) for content_hash in hashes):
                return label
        return ""

    def label_of(self, model: str, wanted: str) -> str:
        """The label of the version that a job calls `wanted`, where another worker would answer it; else empty."""
        if label := self._find(model, wanted):
            return label
        if len(self._missing) >= _MOST_REMEMBERED:
            self._missing.clear()
        self._missing.setdefault((model, wanted), self._clock())
        return ""

    def is_nowhere(self, model: str, wanted: str) -> bool:
        """Whether `label_of` has found nobody for so long that no live worker has it."""
        return self._clock() - self._missing.get((model, wanted), inf) >= _SURE_AFTER_S

    def labels(self, model: str) -> set[str]:
        """What of a model other workers have, or may load for a job."""
        return set(self._offered.get(model, ()))


def _opened(report: bytes) -> _Report:
    try:
        return _decode(report)
    except msgspec.MsgspecError:
        # Whoever may write to the broker may have written it.
        logger.warning("a worker's report cannot be read")
        return _Report()
