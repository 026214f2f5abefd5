"""Model versions into memory and out of it, beside the traffic: each load on a thread of its own, within a limit.

I/O thread -- load --> a thread: runtime.load --> done -- wake --> I/O thread: take_done
             `-- overdue: the version has failed; the thread is left to itself, and what it loads is closed
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable
from math import inf
from typing import Final, NamedTuple

from penstock.registry.errors import ConfigurationError
from penstock.workers.batching.calibrate import calibrate
from penstock.workers.runtime.base import Runtime
from penstock.workers.versions.device_memory import forward_probe, total_bytes
from penstock.workers.versions.version import ServedVersion, VersionState

__all__ = ["Loaded", "Loader", "excess_bytes", "to_unload"]

logger = logging.getLogger("penstock.server")

_MIB: Final = 1024 * 1024
_AT_A_TIME: Final = 2
"""Loads beside each other: each takes a core and the memory of its version."""
_LOOK_S: Final = 0.1
"""How often whoever waits for a load looks whether its limit is over."""


class Loaded(NamedTuple):
    """How a load ended; `problem` is empty when the version is ready, `rows` 0 where none were calibrated."""

    version: ServedVersion
    problem: str
    seconds: float
    rows: int


class _Load(NamedTuple):
    version: ServedVersion
    runtime: Runtime
    since: float


class Loader:
    """Loads versions onto one device. One thread calls everything; `ring` is called on threads of loads.

    device, threads: see Runtime.load. headroom_pct, ceiling: device memory that calibrated batches leave free, in
    percent, and the most rows that they are given. timeout_s: the limit of one load. clock: monotonic seconds.
    """

    def __init__(
        self,
        device: str,
        threads: int,
        *,
        headroom_pct: int = 20,
        ceiling: int = 512,
        timeout_s: float = inf,
        ring: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._device = device
        self._threads = threads
        self._headroom_pct = headroom_pct
        self._ceiling = ceiling
        self._timeout_s = timeout_s
        self._ring = ring
        self._clock = clock
        self._under_way: dict[int, _Load] = {}
        """By the id of the runtime that is loading."""
        self._queued: deque[ServedVersion] = deque()
        self._abandoned: dict[int, ServedVersion] = {}
        """Loads that took too long and go on all the same, by the id of their runtime."""
        self._ended: deque[tuple[Runtime, str, int]] = deque()
        self._has_ended = threading.Event()
        """For whoever waits for a load; see load_now."""

    @property
    def is_busy(self) -> bool:
        """Whether something is being loaded, or has just been."""
        return bool(self._under_way or self._ended or self._queued)

    def load(self, version: ServedVersion) -> None:
        """Begins to load a version that is not loaded; `take_done` tells how that ended.

        A few at a time, in the order in which they were asked for; none beside an earlier load of it that hangs.
        """
        if version in self._abandoned.values():
            version.has_failed(f"{version.spec.reference}: an earlier load of it has not ended yet")
            return
        version.state, version.problem = VersionState.LOADING, ""
        self._queued.append(version)
        self._begin_queued()

    def _begin_queued(self) -> None:
        while self._queued and len(self._under_way) < _AT_A_TIME:
            version = self._queued.popleft()
            runtime = version.runtime
            self._under_way[id(runtime)] = _Load(version, runtime, self._clock())
            self.begin(version, runtime)

    def begin(self, version: ServedVersion, runtime: Runtime) -> None:
        """Runs the load, at whose end `end` is called: on a thread of its own. Whoever steps a drain steps this."""
        name = f"load {version.spec.reference}"
        threading.Thread(target=self._run, args=(version, runtime), name=name, daemon=True).start()

    def end(self, runtime: Runtime, problem: str, rows: int) -> None:
        """A load has ended; for any thread. rows: see Loaded."""
        self._ended.append((runtime, problem, rows))
        self._has_ended.set()
        self._ring()

    def load_now(self, version: ServedVersion) -> None:
        """Loads a version and returns when it is ready. Raises ConfigurationError, also when the limit is over."""
        self._has_ended.clear()
        self.load(version)
        while version.state is VersionState.LOADING:
            self._has_ended.wait(_LOOK_S)
            self.take_done()
        if version.state is VersionState.FAILED:
            raise ConfigurationError(version.problem)

    def take_done(self) -> list[Loaded]:
        """The loads that have ended since the last call, those among them that took too long."""
        done = []
        while self._ended:
            runtime, problem, rows = self._ended.popleft()
            load = self._under_way.pop(id(runtime), None)
            if load is None:
                # It was given up: nobody waits for it any more.
                self._abandoned.pop(id(runtime), None)
                runtime.close()
                continue
            if not problem and load.version.pinned_hash not in ("", runtime.content_hash):
                # The promise was made while it was being loaded.
                runtime.close()
                problem = f"{load.version.spec.reference}: its files are not those that were promoted"
            done.append(Loaded(load.version, problem, self._clock() - load.since, rows))
        now = self._clock()
        for key, load in list(self._under_way.items()):
            if now - load.since > self._timeout_s:
                del self._under_way[key]
                self._abandoned[key] = load.version
                # What it has taken so far goes now, the rest when it ends.
                load.runtime.close()
                problem = f"{load.version.spec.reference}: loading took longer than {self._timeout_s:g} s"
                done.append(Loaded(load.version, problem, now - load.since, 0))
        for loaded in done:
            self._settle(loaded)
        self._begin_queued()
        return done

    def _run(self, version: ServedVersion, runtime: Runtime) -> None:
        problem, rows = "", 0
        try:
            runtime.load(self._device, self._threads)
            rows = self._calibrated_rows(version, runtime)
        except BaseException as error:  # whatever a package raises, the worker goes on serving what it serves
            problem = _problem_of(runtime, error)
        self.end(runtime, problem, rows)

    def _calibrated_rows(self, version: ServedVersion, runtime: Runtime) -> int:
        """Rows that the device's memory allows; 0 where they are known, or not to be measured. Beside other forwards
        the readings are higher, and the rows fewer than they might be."""
        if version.calibrated_rows or not version.policy.is_sized_by_memory or not self._device.startswith("cuda"):
            return 0
        try:
            all_bytes = total_bytes(self._device)
        except ImportError:
            # A GPU without torch, for models of another framework: nobody reads its memory here.
            return 0
        found = calibrate(
            forward_probe(runtime, self._device, version.policy.concurrency),
            total_bytes=all_bytes,
            headroom_pct=self._headroom_pct,
            ceiling=self._ceiling,
        )
        if not found.says_something:
            return 0
        logger.info(
            "batch size calibrated",
            extra={"model": version.name, "max_rows": found.rows, "forwards": len(found.readings)},
        )
        return found.rows

    def _settle(self, loaded: Loaded) -> None:
        version, problem = loaded.version, loaded.problem
        if loaded.rows:
            version.calibrated_rows = loaded.rows
            version.queue.resize(loaded.rows)
        if problem:
            logger.error("model not loaded: %s", problem, extra={"model": version.name, "version": version.label})
            version.has_failed(problem)
            return
        version.has_loaded(self._clock())
        logger.info(
            "model loaded",
            extra={
                "model": version.name,
                "version": version.label,
                "content_hash": version.content_hash,
                "seconds": round(loaded.seconds, 3),
            },
        )


def _problem_of(runtime: Runtime, error: BaseException) -> str:
    if isinstance(error, ConfigurationError):
        return str(error)
    return f"{runtime.spec.reference}: loading failed ({type(error).__name__}: {error!s:.200})"


def excess_bytes(versions: Iterable[ServedVersion], limit_mb: int) -> int:
    """What the loaded versions take beyond `limit_mb` MiB; 0: no limit."""
    taken = sum(version.runtime.memory_bytes for version in versions if version.is_ready)
    return max(0, taken - limit_mb * _MIB) if limit_mb else 0


def to_unload(
    versions: Iterable[ServedVersion], excess: int, answering: Collection[ServedVersion]
) -> list[ServedVersion]:
    """What goes to give so many bytes back: what no operator wants first, then what does not answer, and of these the
    least recently used. Versions with work stay; so does the last that was used."""
    idle = [version for version in versions if version.is_ready and version.is_idle and version.runtime.memory_bytes]
    idle.sort(key=lambda version: (version in answering, version.is_wanted, version.used_at))
    latest = max((version.used_at for version in versions if version.is_ready), default=0.0)
    going = []
    for version in idle:
        if excess > 0 and version.used_at < latest:
            going.append(version)
            excess -= version.runtime.memory_bytes
    return going
