"""Loads model versions beside the traffic: each load on its own thread, within a time limit.

I/O thread -- load --> a thread: runtime.load --> done -- wake --> I/O thread: take_done
             `-- overdue: the version has failed; the thread goes on alone, and its runtime is closed at its end
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Final, NamedTuple

from penstock.registry.errors import ConfigurationError
from penstock.workers.batching.calibrate import calibrate
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.device_peak import total_bytes
from penstock.workers.runtime.tracebacks import message_of, name_of, placed, trace_of
from penstock.workers.versions.device_memory import forward_probe
from penstock.workers.versions.version import ServedVersion, VersionState

__all__ = ["Loaded", "Loader"]

logger = logging.getLogger("penstock.server")

_AT_A_TIME: Final = 2
"""Loads at the same time: each takes a core and the memory of its version."""
_PROBLEM_CHARACTERS: Final = 4_000
_LOOK_S: Final = 0.1
"""How often `load_now` checks the time limit."""


class Loaded(NamedTuple):
    """How a load ended. problem: empty when the version is ready. rows: 0 if the batch size was not calibrated."""

    version: ServedVersion
    problem: str
    seconds: float
    rows: int


class _Load(NamedTuple):
    version: ServedVersion
    runtime: Runtime
    since: float


class Loader:
    """Loads versions onto one device. The I/O thread owns it, except `end`; `ring` is called on the threads of loads.

    device, threads: see Runtime.load. headroom_pct: device memory that calibrated batches leave free, in percent.
    ceiling: the most rows of a calibrated batch. timeout_s: the time limit of one load. clock: monotonic seconds.
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
        """Loads that exceeded the time limit and have not ended, by the id of their runtime."""
        self._ended: deque[tuple[Runtime, str, int]] = deque()
        self._has_ended = threading.Event()
        """Wakes `load_now`."""

    @property
    def is_busy(self) -> bool:
        """Whether a load runs, waits, or has ended and was not taken yet."""
        return bool(self._under_way or self._ended or self._queued)

    def load(self, version: ServedVersion) -> None:
        """Begin to load a version that is not loaded; `take_done` returns the result.

        Few loads run at a time, in the order of the calls. While an earlier load of the version hangs, this one fails.
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
        """Run the load on its own thread, which calls `end`. The simulator overrides this."""
        name = f"load {version.spec.reference}"
        threading.Thread(target=self._run, args=(version, runtime), name=name, daemon=True).start()

    def end(self, runtime: Runtime, problem: str, rows: int) -> None:
        """Note that a load has ended. For any thread. problem, rows: see Loaded."""
        self._ended.append((runtime, problem, rows))
        self._has_ended.set()
        self._ring()

    def load_now(self, version: ServedVersion) -> None:
        """Load a version and return when it is ready. Raises ConfigurationError, also after the time limit."""
        self._has_ended.clear()
        self.load(version)
        while version.state is VersionState.LOADING:
            self._has_ended.wait(_LOOK_S)
            self.take_done()
        if version.state is VersionState.FAILED:
            raise ConfigurationError(version.problem)

    def take_done(self) -> list[Loaded]:
        """The loads that have ended or exceeded the time limit since the last call."""
        done = []
        while self._ended:
            runtime, problem, rows = self._ended.popleft()
            load = self._under_way.pop(id(runtime), None)
            if load is None:
                # It exceeded the time limit before: its version has failed already.
                self._abandoned.pop(id(runtime), None)
                runtime.close()
                continue
            if not problem and load.version.pinned_hash not in ("", runtime.content_hash):
                # The version was promoted while other content of it was loading.
                runtime.close()
                problem = f"{load.version.spec.reference}: its files are not the promoted files"
            done.append(Loaded(load.version, problem, self._clock() - load.since, rows))
        now = self._clock()
        for key, load in list(self._under_way.items()):
            if now - load.since > self._timeout_s:
                del self._under_way[key]
                self._abandoned[key] = load.version
                # Frees the memory that it has taken so far; the rest is freed when it ends.
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
        except BaseException as error:  # a package may raise anything; the worker goes on serving
            problem = _problem_of(runtime, error)
            if problem != version.last_problem:
                _log_trace(version, error)
        self.end(runtime, problem, rows)

    def _calibrated_rows(self, version: ServedVersion, runtime: Runtime) -> int:
        """Rows that the device's memory allows; 0 if they are known already or cannot be measured.

        Other forwards on the device raise the readings: then the rows are fewer than the device allows.
        """
        if version.calibrated_rows or not version.policy.is_sized_by_memory or not self._device.startswith("cuda"):
            return 0
        try:
            all_bytes = total_bytes(self._device)
        except ImportError:
            # A GPU without torch, for models of another framework: its memory cannot be read.
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
            # A version that fails is tried again every few seconds: the same problem is one line of the log.
            level = logging.DEBUG if problem == version.last_problem else logging.ERROR
            logger.log(level, "model not loaded: %s", problem, extra={"model": version.name, "version": version.label})
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
    # A package may raise a ConfigurationError of its own: its text is no more to be relied on than any other.
    if issubclass(type(error), ConfigurationError):
        return message_of(error, _PROBLEM_CHARACTERS)
    problem = f"loading failed ({name_of(error)}: {message_of(error)}){placed(error)}"
    return f"{runtime.spec.reference}: {problem}"


def _log_trace(version: ServedVersion, error: BaseException) -> None:
    """Log where the package or its framework raised an error. The reason follows in a line of its own."""
    origin = error.__cause__ if type(error) is ConfigurationError else error
    if origin is not None:
        facts = {"model": version.name, "version": version.label, "exception": trace_of(origin).text}
        logger.error("loading raised an exception", extra=facts)
