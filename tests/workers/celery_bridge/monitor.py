"""A monitor of task events, made of Celery's own parts: what Flower sees."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from celery import Celery
from celery.events.state import State as ClusterState

from tests.servers import wait_until


class Monitor:
    """Celery's own picture of the cluster, fed by its own receiver."""

    def __init__(self) -> None:
        self.state = ClusterState()
        self.events: list[dict[str, Any]] = []

    def see(self, event: dict[str, Any]) -> None:
        self.events.append(dict(event))
        self.state.event(event)

    def task(self, uuid: str, state: str) -> Any:
        return wait_until(
            lambda: (task := self.state.tasks.get(uuid)) is not None and task.state == state and task,
            10,
            f"task {uuid} is {state}",
        )


@contextmanager
def monitoring(app: Celery) -> Iterator[Monitor]:
    monitor = Monitor()
    is_open, is_over = threading.Event(), threading.Event()

    def watch() -> None:
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": monitor.see})
            with connection.Consumer(receiver.queue, callbacks=[receiver._receive], no_ack=True):
                while not is_over.is_set():
                    with suppress(TimeoutError):
                        connection.drain_events(timeout=0.1 if is_open.is_set() else 0.02)
                    # Kombu subscribes when it is first asked for events; what was sent before is not received.
                    is_open.set()

    thread = threading.Thread(target=watch)
    thread.start()
    assert is_open.wait(180)
    try:
        yield monitor
    finally:
        is_over.set()
        thread.join()
