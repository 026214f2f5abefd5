"""The thread that may wait for disk and broker: it records cache accesses and stores the ends of the audit log."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

from penstock.safety.audit import AuditLogger
from penstock.safety.audit_accesses import CacheAccessAudit

__all__ = ["AuditThread"]

_ANCHOR_S: Final = 1.0
_ACCESSES_S: Final = 60.0
_LEAVE_S: Final = 5.0

logger = logging.getLogger("penstock.server")


class AuditThread:
    """Keeps the audit log of one worker. log: closed at the end. clock: monotonic seconds."""

    def __init__(
        self, log: AuditLogger, accesses: CacheAccessAudit, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._log = log
        self._accesses = accesses
        self._clock = clock
        self._next_flush = clock() + _ACCESSES_S
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Records what is left, stores the end of the log, and ends the thread. Waits for at most five seconds."""
        self._is_stopping.set()
        if self._thread.ident is None:
            return
        self._thread.join(_LEAVE_S)
        if self._thread.is_alive():
            logger.warning("the end of the audit log is not stored: the disk or the broker does not answer")

    def tick(self) -> None:
        """One turn: the accesses of a minute, if it is over, and the ends that are not stored yet."""
        if self._clock() >= self._next_flush:
            self._next_flush = self._clock() + _ACCESSES_S
            self._accesses.flush()
        self._log.anchor()

    def _run(self) -> None:
        while not self._is_stopping.wait(_ANCHOR_S):
            self._do(self.tick)
        self._do(self._accesses.flush)
        self._do(self._log.close)

    def _do(self, step: Callable[[], None]) -> None:
        try:
            step()
        except Exception:
            # The log of decisions still needs its anchors.
            logger.exception("the audit log could not be kept")
