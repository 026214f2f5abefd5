"""Which other workers have a version that is not here, according to the reports of the live workers.

    a job names a version --> label_of: the label under which another worker has it, or may load it for the job
                          `-> is_nowhere: no worker has had it for some seconds

Reports are read at most once a second, and only while a job waits for a version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import Final

import msgspec

from penstock.registry.broker.base import Broker
from penstock.registry.errors import BrokerUnavailable
from penstock.workers.versions.version import is_name_of

__all__ = ["Peers", "limits_in"]

logger = logging.getLogger("penstock.server")

_LOOK_EVERY_S: Final = 1.0
_SURE_AFTER_S: Final = 3.0
"""A worker reports once a second. After an outage of the broker its next report may take two seconds."""
_UNWATCHED_S: Final = 2.5
"""After this time without a reading, the earlier searches do not count."""
_MOST_REMEMBERED: Final = 1000


class _Version(msgspec.Struct):
    content_hash: str = ""
    is_offered: bool = False
    most_tokens: int = 0


class _Report(msgspec.Struct):
    name: str = ""
    ready: bool = False
    models: dict[str, str] = {}
    versions: dict[str, dict[str, _Version]] = {}


_decode: Final = msgspec.json.Decoder(_Report).decode


class Peers:
    """All workers of this broker except `worker`. The I/O thread owns it. clock: monotonic seconds."""

    def __init__(self, broker: Broker, worker: str, clock: Callable[[], float]) -> None:
        self._broker = broker
        self._worker = worker
        self._clock = clock
        self._looked = -inf
        self._offered: dict[str, dict[str, set[str]]] = {}
        """Model -> label -> content hashes."""
        self._limits: dict[tuple[str, str], int] = {}
        """By model and label, the most tokens that one of them has room for."""
        self._missing: dict[tuple[str, str], float] = {}
        """Versions that no worker had, and the time of the first search."""

    def look(self) -> None:
        """Read the reports, at most once a second.

        While they cannot be read, no version is known to be at another worker, and none is known to be nowhere.
        """
        now = self._clock()
        if now - self._looked < _LOOK_EVERY_S:
            return
        if now - self._looked > _UNWATCHED_S:
            self._missing.clear()
        self._looked = now
        self._offered = {}
        try:
            found = self._broker.workers()
        except BrokerUnavailable as error:
            # A worker without the right to read reports goes on with all other jobs.
            logger.warning("the reports of other workers cannot be read: %s", error)
            self._missing.clear()
            return
        reports = _others(found, self._worker)
        self._limits = _limits(reports)
        for report in reports:
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
        """The label of the version that a job calls `wanted`, if another worker offers it; else empty."""
        if label := self._find(model, wanted):
            return label
        self._remember(model, wanted)
        return ""

    def _remember(self, model: str, wanted: str) -> None:
        """Note the first search for a version. A new one beyond the bound is noted when an old one was forgotten."""
        if (model, wanted) in self._missing:
            return
        now = self._clock()
        # The oldest come first. Each has been looked up again since it was sure, so its jobs were told.
        while self._missing and now - next(iter(self._missing.values())) >= 2 * _SURE_AFTER_S:
            del self._missing[next(iter(self._missing))]
        if len(self._missing) < _MOST_REMEMBERED:
            self._missing[model, wanted] = now

    def is_nowhere(self, model: str, wanted: str) -> bool:
        """Whether `label_of` has found no worker for so long that no live worker has the version."""
        return self._clock() - self._missing.get((model, wanted), inf) >= _SURE_AFTER_S

    def most_tokens(self, model: str, label: str) -> int:
        """Of a prompt and its text, as many as the engine of another worker has room for; 0: no other one has any."""
        return self._limits.get((model, label), 0)

    def labels(self, model: str) -> set[str]:
        """The versions of a model that other workers have, or may load for a job."""
        return set(self._offered.get(model, ()))


def limits_in(reports: Sequence[bytes]) -> dict[tuple[str, str], int]:
    """By model and label, the most tokens of a prompt and its text for which a worker that is ready has room."""
    return _limits(_others(reports, ""))


def _others(reports: Sequence[bytes], worker: str) -> list[_Report]:
    return [each for each in map(_opened, reports) if each.ready and each.name != worker]


def _limits(reports: Iterable[_Report]) -> dict[tuple[str, str], int]:
    limits: dict[tuple[str, str], int] = {}
    for report in reports:
        for name, versions in report.versions.items():
            for label, version in versions.items():
                if version.most_tokens > 0:
                    limits[name, label] = max(limits.get((name, label), 0), version.most_tokens)
    return limits


def _opened(report: bytes) -> _Report:
    try:
        return _decode(report)
    except msgspec.MsgspecError:
        # Any client of the broker may write a report.
        logger.warning("a worker's report cannot be read")
        return _Report()
