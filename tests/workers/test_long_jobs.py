"""Jobs of more tokens than their worker has room for: handed over to workers that have it, or failed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.registry.broker.base import Held, State
from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.envelope import open_result
from penstock.registry.errors import BrokerUnavailable
from penstock.workers.versions.token_limits import receiver_of
from tests.flow.conftest import amend
from tests.packages import write_package
from tests.workers.stepped import UNSIGNED, SteppedHarness, open_harness

MOST = 100
"""Tokens for which another worker has room. The stepped one has room for 10."""


@pytest.fixture
def harness(tmp_path: Path) -> Iterator[SteppedHarness]:
    source = """
        from penstock.workers.runtime.base import TooLongHere


        def build():
            def stream(inputs, ctx):
                tokens = int(inputs["x"][0, 0])
                if tokens > 10:
                    raise TooLongHere(f"Found {tokens} tokens, expected at most 10", tokens)
                return {"y": inputs["x"]}
                yield

            return stream
        """
    amend(write_package(tmp_path / "models", "long", source, max_batch_size=1), streams=True)
    yield from open_harness(tmp_path / "models")


class AwayBroker(MemoryBroker):
    """A broker that takes no releases while it is away."""

    def __init__(self, of: MemoryBroker) -> None:
        super().__init__(of._state.clock)
        self._state, self._changed = of._state, of._changed
        self.is_away = False

    def release(self, consumer: str, held: Sequence[Held], *, version: str = "") -> None:
        if self.is_away:
            raise BrokerUnavailable("The broker does not answer")
        super().release(consumer, held, version=version)


def test_long_jobs_go_where_they_have_room(harness: SteppedHarness):
    """A broker that is away meanwhile loses none. What is too long for all fails with the numbers of its worker."""
    versions = {"long": {"1": {"is_offered": True, "most_tokens": MOST}}}
    report = {"name": "other", "ready": True, "versions": versions}
    harness.broker.report("other", json.dumps(report).encode(), 3_600_000)
    worker = harness.start_worker(connect=AwayBroker)
    broker, parts = worker.broker, worker.drain.parts
    assert isinstance(broker, AwayBroker)
    fits, first, second, too_long = harness.publish("long", 10, MOST, MOST - 1, MOST + 1)
    broker.is_away = True
    for _ in range(2):
        assert len(worker.forward()) == 1
    assert (harness.state(fits), harness.state(first)) == (State.COMPLETED, State.QUEUED)
    assert worker.drain.step(0.0), "the broker is left alone for a moment"
    assert len(parts.leased) > 0
    broker.is_away = False
    worker.forwards()
    worker.turn(3)
    assert harness.state(too_long) is State.FAILED
    header, _ = open_result(harness.job_record(too_long).result, UNSIGNED)
    assert header.error is not None
    assert (header.error.code, header.error.message) == ("InputRefused", "Found 101 tokens, expected at most 10")
    assert len(parts.leased) == 0
    assert [version.queue.in_memory for version in worker.drain.lifecycle.turns] == [0]
    adopted = harness.broker.adopt("other", "long", [receiver_of("1", MOST)], 10)
    assert [delivery.attempt for delivery in adopted] == [1, 1]
    assert {harness.state(job) for job in (first, second)} == {State.QUEUED}
