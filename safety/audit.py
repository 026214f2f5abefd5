"""The audit log: decisions, state changes, cache accesses, changes of the registry, operations on keys -> files.

    log_event -- redacted --> the chain of this process (audit_chain.py) -- synced --> acknowledged
                                   '-- anchor, close --> stored heads

A decision is recorded before it takes effect; without a record there is no decision. An entry is acknowledged, which
means that `log_event` returns, only after it is on disk. Each process has files of its own; readers merge them by time.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Final, Self

from penstock.registry.audit_heads import AuditHead, AuditHeads
from penstock.registry.errors import ConfigurationError, PenstockError
from penstock.registry.settings import Settings
from penstock.safety.audit_chain import AuditEntry, ChainKey, ChainWriter
from penstock.safety.audit_details import Redact, cleaned
from penstock.safety.audit_key import audit_keys
from penstock.safety.audit_reader import entries

__all__ = [
    "CACHE_ACCESS",
    "GATE_DECISION",
    "KEY_OPERATION",
    "REGISTRY_CHANGE",
    "STATE_CHANGE",
    "AuditConfig",
    "AuditLogger",
]

GATE_DECISION: Final = "gate_decision"
"""The operation of a verdict on a form of a model: PASS or FAIL."""
STATE_CHANGE: Final = "optimization_state"
"""Of a step of an optimization level: enabled, disabled or refused."""
CACHE_ACCESS: Final = "cache_access"
REGISTRY_CHANGE: Final = "registry_change"
"""Of a transition of a model: register, promote, rollback and so on."""
KEY_OPERATION: Final = "key_operation"
"""Of a data key: made, rotated, wrapped. The details name its id and never hold a key."""

_FOLDER_MODE: Final = 0o700
_MAX_FILE_BYTES: Final = 16 << 20

logger = logging.getLogger("penstock.audit")


@dataclass(frozen=True, slots=True)
class AuditConfig:
    """Where and how a log is written. group_s: the time in which entries share one sync; 0: no wait.

    max_file_bytes: a larger file is followed by the next one of its chain.
    """

    folder: Path
    key: bytes = field(repr=False)
    is_enabled: bool = True
    group_s: float = 0.0
    max_file_bytes: int = _MAX_FILE_BYTES

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """From the settings. Makes the key file if there is no key. Raises ConfigurationError."""
        privacy = settings.inference.privacy
        key = audit_keys(settings, for_writing=True)[0] if privacy.audit_log_enabled else b""
        return cls(privacy.audit_log_path, key, privacy.audit_log_enabled, privacy.audit_group_ms / 1000)


class _Group:
    """Entries that share one sync. Their callers wait until it is over."""

    def __init__(self) -> None:
        self.is_over = threading.Event()
        self.error: OSError | None = None


class AuditLogger:
    """The audit log of one process. For any thread.

    max_entries: the most entries that `get_entries_since` returns. config: None for that of the environment's settings.
    writer: the begin of the names of its files, such as the worker's name. redact: applied to every string of the
    details. heads: where the ends of its chain are kept. clock: unix seconds. pause: waits for the rest of a group.

    Raises ConfigurationError when the folder cannot be written.

    Attributes:
        anchor_failures: how often the ends of the chain could not be stored.
    """

    def __init__(
        self,
        max_entries: int = 10_000,
        config: AuditConfig | None = None,
        *,
        writer: str = "program",
        redact: Redact | None = None,
        heads: Sequence[AuditHeads] = (),
        clock: Callable[[], float] = time.time,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        if max_entries < 1:
            raise ConfigurationError(f"max_entries is {max_entries}. Expected at least 1")
        self._config: Final = config or AuditConfig.of(Settings.load())
        self._max_entries = max_entries
        self._redact = redact or _unchanged
        self._heads = heads
        self._pause = pause
        self._lock = threading.Lock()
        self._group: _Group | None = None
        self._pid = os.getpid()
        self._chain = ChainWriter(
            self._config.folder,
            writer,
            ChainKey(self._config.key),
            max_file_bytes=self._config.max_file_bytes,
            clock=clock,
        )
        self._anchoring = threading.Lock()
        self._unstored: dict[str, AuditHead] = {}
        """The ends on disk that are not stored yet, by chain."""
        self.anchor_failures = 0
        if self._config.is_enabled:
            _check_folder(self._config.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def syncs(self) -> int:
        """How often entries were brought to the disk."""
        return self._chain.syncs

    def log_event(
        self,
        operation: str,
        model_id: str | int = "",
        optimization_name: str = "",
        result: str = "",
        details: Mapping[str, Any] | None = None,
    ) -> AuditEntry | None:
        """Records one event, and returns its entry once it is on disk; None while the log is off.

        The details hold names, figures and reasons, and never inputs: bytes and arrays are written as their type.
        Raises OSError when it could not be recorded, and InvalidInput for an entry of more than 64 KiB.
        """
        if not self._config.is_enabled:
            return None
        clean = cleaned(details or {}, self._redact)
        if os.getpid() != self._pid:
            self._begin_in_fork()
        with self._lock:
            entry = self._chain.append(operation, model_id, optimization_name, result, clean)
            is_first = self._group is None
            group = self._group = self._group or _Group()
        if is_first:
            self._lead(group)
        else:
            group.is_over.wait()
        if group.error is not None:
            raise OSError(group.error.errno, group.error.strerror)
        return entry

    def get_entries_since(self, timestamp: float | datetime) -> list[AuditEntry]:
        """The entries later than this time, of every writer in the folder, also of earlier runs; oldest first.

        timestamp: unix seconds, or a datetime. At most `max_entries`, the newest ones. Raises OSError.
        """
        since = timestamp.timestamp() if isinstance(timestamp, datetime) else timestamp
        return entries([self._config.folder], self._max_entries, since).entries

    def anchor(self) -> None:
        """Stores the ends of the chain, over the network. The next call tries again where a store could not be reached.

        Call it soon after entries: those after the last stored end can be cut off unnoticed.
        """
        with self._anchoring:
            with self._lock:
                due, self._unstored = self._unstored, {}
            if due and not self._store(due):
                with self._lock:
                    self._unstored = {**due, **self._unstored}

    def close(self) -> None:
        """Closes the file and stores the end of the chain."""
        with self._lock:
            if self._group is not None:
                self._sync(self._group)
            with suppress(OSError):
                self._chain.close()
        self.anchor()

    def _begin_in_fork(self) -> None:
        """The threads that held the locks or waited for a group are the parent's."""
        self._pid = os.getpid()
        self._lock, self._anchoring = threading.Lock(), threading.Lock()
        self._group, self._unstored = None, {}
        self._chain.leave_to_parent()

    def _lead(self, group: _Group) -> None:
        """Syncs for the whole group. Entries that come during the sync form the next one."""
        try:
            if self._config.group_s:
                self._pause(self._config.group_s)
        finally:
            with self._lock:
                self._group = None
                self._sync(group)
            group.is_over.set()

    def _sync(self, group: _Group) -> None:
        writer, head = self._chain.writer, self._chain.head
        try:
            self._chain.sync()
        except OSError as error:
            group.error = error
            return
        self._unstored[writer] = head

    def _store(self, due: Mapping[str, AuditHead]) -> bool:
        is_stored = True
        for store in self._heads:
            try:
                store.put(due)
            except PenstockError as problem:
                is_stored = False
                self.anchor_failures += 1
                logger.warning("the end of the audit log could not be stored", extra={"reason": str(problem)})
        return is_stored


def _unchanged(text: str) -> str:
    return text


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"The audit log cannot be written ({error.strerror}). Expected an audit_log_path that this user may "
            "write to, or audit_log_enabled = false"
        ) from None
