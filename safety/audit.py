"""The audit log: decisions -> an append-only file, one JSON line each, with the change and its reason.

A decision is recorded before it takes effect; without a record there is no decision. One line is one write, so that
processes may share a file.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from penstock.registry.errors import ConfigurationError

__all__ = ["AuditLog"]

_FILE_MODE: Final = 0o600
_FOLDER_MODE: Final = 0o700


class AuditLog:
    """The audit log `<folder>/<name>.jsonl`, readable by its owner only. clock: unix seconds.

    Raises ConfigurationError when it cannot be written.
    """

    def __init__(self, folder: Path, name: str, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        try:
            folder.mkdir(mode=_FOLDER_MODE, parents=True, exist_ok=True)
            self.path: Final = folder / f"{name}.jsonl"
            os.close(os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _FILE_MODE))
        except OSError as error:
            raise ConfigurationError(
                f"The audit log cannot be written ({error.strerror}). Expected an audit_log_path that this user may "
                "write to, or audit_log_enabled = false"
            ) from None

    def record(self, kind: str, facts: Mapping[str, object]) -> None:
        """Appends one record. Raises OSError; then the file ends, at most, with a part of the line."""
        line = json.dumps({"at": self._clock(), "kind": kind, **facts}, default=str).encode() + b"\n"
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, _FILE_MODE)
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
