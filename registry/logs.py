"""Logs: one JSON object per line, from our modules and from every library, through the standard root logger.

    {"ts": "2026-11-20T18:00:00.123456Z", "level": "info", "logger": "server", "msg": "batch done", "model": "mlp"}

Our loggers are `server` (the worker), `runtime` (models) and `client` (producers). What a caller passes in
`extra={"job_id": ...}` becomes a key of the object; an exception becomes one key with its traceback.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import TextIO

import structlog
from structlog.typing import EventDict, WrappedLogger

__all__ = ["configure"]


_extras = structlog.stdlib.ExtraAdder()


def configure(level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send everything at `level` or above to `stream` (default: stderr), in place of what was configured before.

    Raises ValueError for a level that logging does not know.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(processors=[_fields, structlog.processors.format_exc_info, _render])
    )
    root = logging.getLogger()
    root.setLevel(level)
    root.handlers[:] = [handler]
    logging.captureWarnings(True)


def _fields(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    """The record as one flat object: our four fields first, which an extra of the same name does not replace."""
    record: logging.LogRecord = event.pop("_record")
    del event["_from_structlog"]
    ours = {
        "ts": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "msg": event.pop("event"),
    }
    extras = _extras(logger, method, {"_record": record})
    del extras["_record"]
    return {**ours, **extras, **event, **ours}


def _render(_logger: WrappedLogger, _method: str, event: EventDict) -> str:
    return json.dumps(event, default=str)
