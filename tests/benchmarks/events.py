"""A monitor: counts Celery's task events as Flower receives them, so that they are really sent."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Any, Final

from celery import Celery

from tests.servers import wait_until

__all__ = ["EventListener"]

_TIMEOUT_S: Final = 10.0


class EventListener:
    """Counts `task-succeeded` between entry and exit, on a thread of its own."""

    def __init__(self, url: str) -> None:
        self.succeeded = 0
        self._app = Celery("listener", broker=url)
        self._connection = self._app.connection()
        self._is_listening = threading.Event()
        self._receiver = self._app.events.Receiver(self._connection, handlers={"task-succeeded": self._count})
        self._receiver.on_consume_ready = self._ready
        self._thread = threading.Thread(target=self._receiver.capture, name="listener", daemon=True)

    def __enter__(self) -> EventListener:
        self._thread.start()
        self._is_listening.wait(_TIMEOUT_S)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._receiver.should_stop = True
        self._thread.join(_TIMEOUT_S)
        self._connection.release()

    def await_succeeded(self, jobs: int) -> int:
        """The number of jobs seen to succeed, as soon as it is `jobs`. Fails the benchmark when it stays below."""
        wait_until(lambda: self.succeeded >= jobs, _TIMEOUT_S, f"{jobs} task-succeeded events")
        return self.succeeded

    def _count(self, _: object) -> None:
        self.succeeded += 1

    def _ready(self, *_: Any, **__: Any) -> None:
        self._is_listening.set()
