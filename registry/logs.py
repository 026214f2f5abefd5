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
from datetime import UTC, datetime
from typing import Final, TextIO

import msgspec

__all__ = ["JsonFormatter", "configure"]

_FAMILY: Final = "penstock."
_OF_LOGGING: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Write records of `level` and above to `stream` (default: stderr), instead of the handlers configured before.

    Raises ValueError for an unknown level.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.setLevel(level)
    root.handlers[:] = [handler]
    logging.captureWarnings(True)


class JsonFormatter(logging.Formatter):
    """A record as one flat JSON object. Our four fields come first; an extra of the same name does not replace them."""

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
        try:
            return _encode(line).decode()
        except UnicodeEncodeError:
            # For example undecodable bytes of a file name: UTF-8 cannot encode them, JSON can escape them.
            return json.dumps(line, default=str)


_encode: Final = msgspec.json.Encoder(enc_hook=str).encode
