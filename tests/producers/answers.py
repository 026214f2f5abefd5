"""The part of a worker, without one: jobs are claimed and ended by the test, in the order that it wants."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.registry.broker.base import Broker, Claim, Commit, Delivery, Held, State
from penstock.registry.envelope import Failure, JobHeader, Keyring, RequestContext, ResultHeader, open_job, seal
from penstock.registry.tensors import encode

UNSIGNED = Keyring.parse(None)
TTL_MS = 60_000


class Claimed(NamedTuple):
    """A job that the test holds as a worker does."""

    delivery: Delivery
    header: JobHeader


def claim(broker: Broker, model: str, count: int = 64) -> list[Claimed]:
    """The jobs that wait, in their order."""
    broker.prepare([model])
    _, deliveries = broker.exchange("test", [], [Claim(model, count, 0, TTL_MS)], TTL_MS)
    return [Claimed(delivery, open_job(delivery.sealed, UNSIGNED)[0]) for delivery in deliveries]


def held(job: Claimed) -> Held:
    """The job as its holder names it."""
    return Held(job.delivery.slot, job.delivery.priority, job.delivery.entry_id, job.header.id)


def end(broker: Broker, *jobs: Claimed, state: State = State.COMPLETED, value: float = 1.0) -> None:
    """Ends jobs: COMPLETED with `y` and `z` of one row of `value`, another state with a ModelError."""
    failure = None if state is State.COMPLETED else Failure("ModelError", "KeyError: 'k'")
    outputs = {"y": np.full((1, 4), value, np.float32), "z": np.full(1, value, np.float32)}
    content, body = ((), b"") if failure else encode(outputs)
    commits = []
    for delivery, header in jobs:
        result = ResultHeader(header.id, RequestContext(header.tenant), content=content, error=failure)
        sealed = seal("result", result, body, UNSIGNED)
        commits.append(
            Commit(
                *(delivery.slot, delivery.priority, delivery.entry_id, header.id, state, sealed, header.tenant),
                *(header.reply, header.idempotency_digest),
            )
        )
    broker.exchange("test", commits, [], TTL_MS)
