"""Loads the versions that operators requested in Redis, and unloads those that they released.

    operator -- put --> `<prefix>:wanted`, a signed record for each version
    worker   -- Reconciler.sweep, every few seconds --> loads newly requested versions, unloads released ones
             -- report --> `<prefix>:loaded`, the versions of this worker, for operators

Each record is followed once. After a failed load the operator requests the version again, which writes a new record.
A store that is away or was emptied unloads no active version. Without a store, each worker loads the versions that
control commands name. With one, a command to one worker is carried out behind the records that were written before it.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import BrokerUnavailable, Corrupt
from penstock.registry.signed import Verifier

__all__ = ["ReconcilerTarget", "Reconciler"]

_LEAVE_S: Final = 1.0
"""The longest time for which a silent store delays the end of a worker."""

logger = logging.getLogger("penstock.server")


class ReconcilerTarget(Protocol):
    """A worker, as the reconciler sees it."""

    def may_serve(self, name: str) -> bool:
        """Whether this worker serves the model."""

    def request_load(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Load a version and keep it."""

    def request_unload(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Unload a version once it is idle and not active; jobs that name it may have this content loaded."""

    def described(self) -> Mapping[str, object]:
        """The versions of this worker, as plain data."""


class Reconciler:
    """Sweeps every `interval_s` seconds and when nudged, on its own thread."""

    def __init__(
        self,
        store: StateStore,
        target: ReconcilerTarget,
        *,
        worker: str,
        interval_s: float,
        verify: Verifier | None = None,
    ) -> None:
        self._store = store
        self._target = target
        self._worker = worker
        self._interval_s = interval_s
        self._verify = verify
        self._followed: dict[str, bytes] = {}
        self._is_nudged = threading.Event()
        self._later: deque[Callable[[], None]] = deque()
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Start the thread, which begins with a sweep."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Begin no further sweep; does not wait for the current one."""
        self._is_stopping = True
        self._is_nudged.set()

    def stop(self) -> None:
        """End the thread and withdraw its report, unless the store does not answer."""
        self.ask_to_stop()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)
            if self._thread.is_alive():
                logger.warning("the report of loaded models stays: the store of model states does not answer")

    def nudge(self) -> None:
        """Sweep now."""
        self._is_nudged.set()

    def sweep_before(self, request: Callable[[], None]) -> None:
        """Sweep now, then call `request` on the reconciler's thread, also while the store is away.

        Operators use two ways. A record that was written before a command must not be followed after it: a version that
        the command wants would be unloaded again, because its registration is stored as a request to unload it.
        """
        self._later.append(request)
        self._is_nudged.set()

    def sweep(self) -> None:
        """Follow the new records, then report. Raises BrokerUnavailable before any version is unloaded."""
        desired = self._store.desired()
        for reference, record in desired.items():
            if self._followed.get(reference) != record:
                self._follow(reference, record)
        self._followed = desired
        self._store.report(self._worker, {"models": self._target.described()})

    def _follow(self, reference: str, record: bytes) -> None:
        try:
            desired_version = DesiredVersion.open(record, self._verify)
        except Corrupt as error:
            logger.error("a requested version is refused: %s", error, extra={"reference": reference[:160]})
            return
        if desired_version.reference != reference or not self._target.may_serve(desired_version.model):
            return
        if desired_version.is_wanted:
            self._target.request_load(
                desired_version.model, desired_version.version, content_hash=desired_version.content_hash
            )
        else:
            self._target.request_unload(
                desired_version.model, desired_version.version, content_hash=desired_version.content_hash
            )

    def _run(self) -> None:
        while not self._is_stopping:
            # A request that comes during the sweep may be younger than what the sweep has read.
            due = len(self._later)
            self._try(self.sweep, "models are not reconciled")
            for _ in range(due):
                self._later.popleft()()
            self._is_nudged.wait(self._interval_s)
            # After the wait, so that the nudge of a stop during the sweep is not lost.
            self._is_nudged.clear()
        self._try(lambda: self._store.withdraw(self._worker), "the report of loaded models stays")
        self._store.close()

    def _try(self, step: Callable[[], None], otherwise: str) -> None:
        try:
            step()
        except BrokerUnavailable as error:
            logger.warning("%s: %s", otherwise, error)
