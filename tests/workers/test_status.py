"""What a worker reports about itself, and when that ends."""

from __future__ import annotations

import threading
from pathlib import Path

from penstock.registry.broker.base import Depth
from penstock.registry.broker.memory import MemoryBroker
from tests.packages import write_recorder
from tests.servers import wait_until
from tests.workers.stepped import (
    SteppedHarness,
)


class SlowDepths(MemoryBroker):
    """A broker that takes its time to count, once `is_slow` is set, until `may_go` is."""

    def __init__(self, of: MemoryBroker) -> None:
        super().__init__()
        self._state, self._changed = of._state, of._changed
        self.is_slow, self.has_begun, self.may_go = threading.Event(), threading.Event(), threading.Event()

    def depths(self, slot: str) -> list[Depth]:
        if self.is_slow.is_set():
            self.has_begun.set()
            self.may_go.wait(60)
        return super().depths(slot)


def test_a_worker_that_has_stopped_is_not_reported_any_more(
    harness: SteppedHarness, models_root: Path, forward_log: Path
):
    """A report that was under way when the drain wound up does not outlive it."""
    write_recorder(models_root, forward_log)
    worker = harness.start_worker(connect=SlowDepths)
    broker = worker.broker
    assert isinstance(broker, SlowDepths)
    broker.is_slow.set()
    worker.drain.start()
    assert broker.has_begun.wait(60), "a report is under way"
    stopping = threading.Thread(target=worker.drain.stop, args=(1.0,))
    stopping.start()
    wait_until(lambda: "drain" not in [each.name for each in threading.enumerate()], 10, "the drain has wound up")
    broker.may_go.set()
    stopping.join(60)
    assert harness.broker.workers() == []
