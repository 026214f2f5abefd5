"""Wanted and loaded versions, brought together: what operators want lies in Redis, and every worker sweeps for it.

    operator -- want, unwant --> `<prefix>:wanted`, a signed record per version
    worker   -- Reconciler.sweep, every few seconds --> loads what is new there, lets go of what is not wanted any more
             -- `<prefix>:loaded`, what it has --> whoever looks

A record is acted on once, when it is new: a version that cannot be loaded is not tried for ever, and asking again
writes a new record. A store that is away or was emptied unloads nothing that answers jobs. Without a store each
worker keeps its own state, and is told by control commands what to load.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import BrokerUnavailable, Corrupt
from penstock.registry.signed import Verifier

__all__ = ["ReconcilerTarget", "Reconciler"]

_LEAVE_S: Final = 1.0
"""How long a store that does not answer may keep a worker from its end."""

logger = logging.getLogger("penstock.server")


class ReconcilerTarget(Protocol):
    """A worker, as the reconciler sees it."""

    def may_serve(self, name: str) -> bool:
        """Whether the model is one that this worker serves."""

    def request_load(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Load a version and keep it."""

    def request_unload(self, name: str, label: str, *, content_hash: str = "") -> None:
        """Unload a version once it is idle, unless it answers; jobs that name it may have this content loaded."""

    def described(self) -> Mapping[str, object]:
        """What is loaded here, as plain data."""


class Reconciler:
    """Sweeps every `interval_s` seconds, on a thread of its own, or when nudged."""

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
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="reconciler", daemon=True)

    def start(self) -> None:
        """Begins with a sweep."""
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Begins no further sweep; does not wait for the one that is under way."""
        self._is_stopping = True
        self._is_nudged.set()

    def stop(self) -> None:
        """Ends, and takes back what it had reported, unless the store does not answer."""
        self.ask_to_stop()
        if self._thread.ident is not None:
            self._thread.join(_LEAVE_S)
            if self._thread.is_alive():
                logger.warning("the report of loaded models stays: the store of model states does not answer")

    def nudge(self) -> None:
        """Sweep now."""
        self._is_nudged.set()

    def sweep(self) -> None:
        """Act on what is new, then say what is loaded. Raises BrokerUnavailable, and then nothing was unloaded."""
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
            logger.error("a wanted version is not believed: %s", error, extra={"reference": reference[:160]})
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
            self._try(self.sweep, "models are not reconciled")
            self._is_nudged.wait(self._interval_s)
            # Afterwards, or the nudge of a stop that came meanwhile would be lost.
            self._is_nudged.clear()
        self._try(lambda: self._store.withdraw(self._worker), "the report of loaded models stays")
        self._store.close()

    def _try(self, step: Callable[[], None], otherwise: str) -> None:
        try:
            step()
        except BrokerUnavailable as error:
            logger.warning("%s: %s", otherwise, error)
