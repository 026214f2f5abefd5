"""What a process knows of the broker's clock, when its own time stood still meanwhile. F6."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from penstock.registry.broker.base import Claim
from penstock.registry.broker.redis_streams import RedisStreams
from tests.servers import RedisServer, let_pass

FROZEN_S = 0.3


def test_an_answer_that_was_read_late_does_not_set_the_clock_back(
    shared_redis: RedisServer, slot: str, monkeypatch: pytest.MonkeyPatch
):
    """A process that was stopped between the answer and its reading goes on with the time that it knew: a deadline
    that has passed meanwhile has passed. If the broker's clock was really set, its time is used."""
    broker = RedisStreams.from_url(shared_redis.url)
    broker.prepare([slot])
    claim = [Claim(slot, 1, 0, 1000)]
    run_all = broker._run_all

    def run_and_stop(calls: Sequence[Any], meanwhile: Callable[[], None] | None) -> list[Any]:
        answers = run_all(calls, meanwhile)
        let_pass(FROZEN_S)
        return answers

    broker.exchange("w1", [], claim, 1000)
    right_ms = broker.clock_offset_ms
    monkeypatch.setattr(broker, "_run_all", run_and_stop)
    broker.exchange("w1", [], claim, 1000)
    assert abs(broker.clock_offset_ms - right_ms) < FROZEN_S * 1000 / 2
    monkeypatch.undo()
    for wrong_ms in (-60_000, 60_000):
        broker.clock_offset_ms = right_ms + wrong_ms
        broker.exchange("w1", [], claim, 1000)
        assert abs(broker.clock_offset_ms - right_ms) < abs(wrong_ms) / 2
    broker.close()
