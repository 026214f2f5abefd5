"""Celery's consumer, changed in one point: neither an unreadable message nor a lost connection ends the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from celery.worker.consumer import Consumer
from celery.worker.consumer.consumer import (
    INVALID_TASK_ERROR,
    MESSAGE_DECODE_ERROR,
    UNKNOWN_FORMAT,
    UNKNOWN_TASK_ERROR,
)
from kombu.exceptions import OperationalError

__all__ = ["ResilientConsumer", "drop_message"]

_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError)
_CONNECTION_LOST: Final = (OperationalError, RuntimeError)
"""Further names that kombu and redis-py have for a lost connection."""
_REPORTS: Final = {
    UNKNOWN_FORMAT: ("a message that is not a task was dropped", slice(0)),
    UNKNOWN_TASK_ERROR: ("a task of an unknown name was dropped: %s", slice(1)),
    INVALID_TASK_ERROR: ("an invalid task message was dropped: %s", slice(1)),
    MESSAGE_DECODE_ERROR: ("a message that cannot be decoded was dropped: type %r, encoding %r", slice(1, 3)),
}
"""Celery's reports of messages that it cannot handle, and what is logged instead, with which of their arguments."""

logger = logging.getLogger("penstock.server")


def drop_message(record: logging.LogRecord) -> bool:
    """Remove a message's body and headers, which may hold inputs, from Celery's report that it cannot be handled."""
    if isinstance(record.msg, str) and isinstance(record.args, tuple) and record.msg in _REPORTS:
        record.msg, kept = _REPORTS[record.msg]
        record.args = record.args[kept]
    return True


class ResilientConsumer(Consumer):  # type: ignore[misc]  # Celery is untyped
    """Reconnects after an unreadable message, as Celery's consumer does after a lost connection.

    Celery's own consumer would end the worker, and the drain with it. kombu removes such a message from the queue
    before it fails to read it, so it does not come back.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.channel_errors = (*self.conninfo.channel_errors, *_UNREADABLE, *_CONNECTION_LOST)

    def on_connection_error_after_connected(self, exc: Exception) -> None:
        """Celery's own step, which closes the lost connection; its errors are no end, either.

        kombu first gives back the messages that it holds, such as those that wait for their `eta`, and fails to. The
        broker still has them: they come back after the visibility time-out.
        """
        try:
            super().on_connection_error_after_connected(exc)
        except (*self.connection_errors, *self.channel_errors) as error:
            logger.warning("the lost connection to Celery's broker could not be closed: %s", type(error).__name__)

    def create_task_handler(self, *args: Any, **options: Any) -> Callable[[Any], None]:
        """Celery's handler, which drops a message that it cannot handle: it would come back at every reconnect."""
        handle = super().create_task_handler(*args, **options)

        def handle_or_drop(message: Any) -> None:
            try:
                handle(message)
            except _UNREADABLE as error:
                logger.error("a message that is not a task was dropped: %s", type(error).__name__)
                message.reject_log_error(logger, self.connection_errors)

        return handle_or_drop
