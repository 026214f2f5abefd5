"""Logs: one JSON object per line, from our modules and from every library, through the standard root logger.

    {"ts": "2026-11-20T18:00:00.123456Z", "level": "info", "logger": "server", "msg": "batch done", "model": "mlp"}

Our loggers are one family, `penstock.*`: `penstock.server` (the worker), `penstock.runtime` (models),
`penstock.client` (producers). The field `logger` omits the name of the family. A key of `extra={"job_id": ...}` becomes
a key of the object; an exception becomes one key with its traceback. A worker writes one line per batch, so the
formatter is part of the job path.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from io import TextIOBase
from typing import Any, Final, TextIO

import msgspec

__all__ = ["JsonFormatter", "configure"]

_FAMILY: Final = "penstock."
_MOST_EXCEPTIONS: Final = 5
_FIXED: Final = frozenset({"ts", "level", "logger"})
_OF_LOGGING: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(
    level: str = "INFO",
    stream: TextIO | TextIOBase | None = None,
    *,
    withholds_texts: bool = False,
    redact: Callable[[Any], Any] | None = None,
) -> None:
    """Write records of `level` and above to `stream` (default: stderr), instead of the handlers configured before.

    withholds_texts: leave the messages of exceptions out of tracebacks. redact: changes each value of a line but its
    time, its level and its logger; it gets nested data. Raises ValueError for an unknown level.
    """
    handler = _Handler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter(withholds_texts=withholds_texts, redact=redact))
    root = logging.getLogger()
    root.setLevel(level)
    root.handlers[:] = [handler]
    logging.captureWarnings(True)


class _Handler(logging.StreamHandler[Any]):
    """A line that cannot be written is lost, and its caller goes on."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes one line. A field that contains itself, or is nested too deeply, cannot be written."""
        try:
            super().emit(record)
        except RecursionError:
            self.handleError(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Tells of the error on stderr, which may be closed as well."""
        with suppress(Exception):
            super().handleError(record)


class JsonFormatter(logging.Formatter):
    """A record as one flat JSON object. Our four fields come first; an extra of the same name does not replace them.

    withholds_texts, redact: see configure.
    """

    def __init__(self, *, withholds_texts: bool = False, redact: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self._withholds_texts = withholds_texts
        self._redact = redact
        self._encode = _encode if redact is None else msgspec.json.Encoder(enc_hook=self._shown).encode

    def formatException(self, ei: Any) -> str:
        """The traceback of an exception."""
        return _frames(ei[1]) if self._withholds_texts else super().formatException(ei)

    def format(self, record: logging.LogRecord) -> str:
        """One line, without its end."""
        ts = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds")
        line: dict[str, object] = {
            "ts": ts.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name.removeprefix(_FAMILY),
            "msg": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _OF_LOGGING:
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if self._redact is not None:
            line = {name: value if name in _FIXED else self._redact(value) for name, value in line.items()}
        try:
            return self._encode(line).decode()
        except UnicodeEncodeError:
            # For example undecodable bytes of a file name: UTF-8 cannot encode them, JSON can escape them.
            return json.dumps(line, default=self._shown)

    def _shown(self, value: object) -> str:
        """An object that JSON does not know, as text."""
        text = str(value)
        return text if self._redact is None else str(self._redact(text))


def _frames(error: BaseException | None) -> str:
    """The classes of an exception and of those that led to it, with their frames."""
    lines: list[str] = []
    while error is not None and len(lines) < _MOST_EXCEPTIONS:
        lines.append("".join(traceback.format_tb(error.__traceback__)) + type(error).__name__)
        error = error.__cause__ or error.__context__
    return "\n".join(reversed(lines))


_encode: Final = msgspec.json.Encoder(enc_hook=str).encode
