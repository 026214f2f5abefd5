"""Celery's consumer, changed in one point: neither an unreadable message nor a lost connection ends the worker."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from celery.worker.consumer import Consumer
from kombu.exceptions import OperationalError

__all__ = ["ResilientConsumer"]

_UNREADABLE: Final = (ValueError, TypeError, KeyError, AttributeError)
_CONNECTION_LOST: Final = (OperationalError, RuntimeError)
"""Further names that kombu and redis-py have for a lost connection."""

logger = logging.getLogger("penstock.server")


class ResilientConsumer(Consumer):  # type: ignore[misc]  # Celery is untyped
    """Reconnects after an unreadable message, as Celery's consumer does after a lost connection.

    Celery's own consumer would end the worker, and the drain with it. kombu removes such a message from the queue
    before it fails to read it, so it does not come back.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.channel_errors = (*self.conninfo.channel_errors, *_UNREADABLE, *_CONNECTION_LOST)

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
