"""The order of waiting requests."""

from __future__ import annotations

import random
from functools import partial

import pytest

from penstock.workers.generation.request_queue import PriorityRequestQueue, order_at
from penstock.workers.generation.scheduler import Sequence


def waiting(priority: int, arrival: int, since_step: int = 0) -> Sequence:
    """A request that came as the `arrival`th."""
    return Sequence(str(arrival), [1], 1, priority=priority, arrival=arrival, since_step=since_step)


def test_priorities_then_first_come_first_served():
    """ES-037: eight priorities, shuffled; inside of one, the order of arrival."""
    queue: PriorityRequestQueue[Sequence] = PriorityRequestQueue(ageing_steps=1_000)
    chosen = random.Random(1)
    requests = [waiting(chosen.randrange(8), arrival) for arrival in range(200)]
    for request in chosen.sample(requests, len(requests)):
        queue.push(request)
    popped = [queue.pop(step=1) for _ in range(len(queue))]
    assert [(one.priority, one.arrival) for one in popped] == sorted((one.priority, one.arrival) for one in requests)
    with pytest.raises(IndexError, match="No request waits"):
        queue.pop(step=1)


def test_heads_are_enough_to_compare_aged_requests():
    """With ages, pops are in the order that sorting all requests gives."""
    chosen = random.Random(2)
    for _ in range(50):
        queue: PriorityRequestQueue[Sequence] = PriorityRequestQueue(ageing_steps=3)
        since = 0
        left = []
        for arrival in range(20):
            since += chosen.randrange(3)
            left.append(waiting(chosen.randrange(4), arrival, since))
            queue.push(left[-1])
        step = since
        while left:
            step += chosen.randrange(3)
            expected = min(left, key=partial(order_at, step=step, ageing_steps=3))
            if chosen.random() < 0.2:
                gone = chosen.choice(left)
                queue.remove(gone)
                left.remove(gone)
                continue
            assert queue.pop(step) is expected
            left.remove(expected)
