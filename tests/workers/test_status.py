"""What a worker reports about itself, and when that ends."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.registry.broker.base import Depth
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import Keyring
from penstock.registry.key_reports import key_report
from tests.packages import write_double, write_recorder
from tests.servers import wait_until
from tests.workers.stepped import SteppedHarness, open_harness


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


SECRET = base64.b64encode(b"s" * 32).decode()


@pytest.fixture
def signing(models_root: Path) -> Iterator[SteppedHarness]:
    """Two models, and workers with two keys."""
    write_double(models_root, "one")
    write_double(models_root, "two")
    yield from open_harness(models_root, signing_keys=f"k1:{SECRET},k2:{SECRET}")


def test_the_names_of_the_signing_keys_are_published(signing: SteppedHarness):
    """In the worker's report and beside the spec of each model, while the worker lives; the keys are in neither."""
    harness = signing
    worker = harness.start_worker()
    worker.drain.leases.tick()
    names = harness.settings.keyring.names
    published = (key_report(worker.drain.name, harness.settings.keyring),)
    assert {model: harness.broker.announced(model).key_reports for model in ("one", "two")} == {
        "one": published,
        "two": published,
    }
    (report,) = harness.broker.workers()
    assert json.loads(report)["keys"] == [[name.id, name.fingerprint] for name in names]
    assert SECRET.encode() not in report + published[0]
    harness.pass_time(60)
    assert harness.broker.announced("one").key_reports == published
    worker.drain.parts.status.withdraw()
    assert harness.broker.announced("one").key_reports == ()


def test_a_worker_without_keys_says_so(harness: SteppedHarness, models_root: Path):
    """Then a client that signs learns that no job of its would be accepted; a dead worker says nothing."""
    write_double(models_root)
    worker = harness.start_worker()
    worker.drain.leases.tick()
    assert harness.broker.announced("double").key_reports == (key_report(worker.drain.name, Keyring.parse(None)),)
    harness.suspend(worker)
    harness.pass_time(16)
    assert harness.broker.announced("double").key_reports == ()
