"""P1: subscribers of one job reconnect 100 times at random, read slowly, or stop reading."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import pytest

from penstock import Client, JobEvent, JobHandle
from tests.faults.conftest import OpenStage, Stage, Trial
from tests.faults.proxy import Proxy
from tests.faults.rounds import seeds
from tests.servers import ROOT

RECONNECTS = 100
COUNT = 300
"""What the job counts to: so many chunks, and as many progress events."""
DELAY_MS = 5.0


class Harness(NamedTuple):
    """A stage that counts aloud, and the proxy that its subscribers come through."""

    stage: Stage
    proxy: Proxy


@pytest.fixture(scope="module")
def harness(open_stage: OpenStage) -> Iterator[Harness]:
    """One worker, which is not behind the proxy."""
    stage = open_stage(model="counter")
    shutil.copytree(ROOT / "models" / "counter", stage.models_root / "counter")
    stage.start_worker()
    with Proxy(stage.server.port) as proxy:
        yield Harness(stage, proxy)


def _count(client: Client, count: int, delay_ms: float) -> JobHandle:
    return client.submit("counter", {"count": [count], "delay_ms": [delay_ms]})


def _check_whole(events: list[JobEvent], count: int) -> None:
    """Every event of the job is there once, in its order."""
    assert [event.seq for event in events] == [*range(1, 2 * count + 4)]
    values = [int(event.data["value"][0]) for event in events if event.type == "chunk"]
    assert values == [*range(1, count + 1)]
    assert [event.type for event in events[:2]] == ["queued", "started"]
    assert events[-1].type == "completed"


@pytest.mark.parametrize("seed", seeds(ways=2))
def test_hundred_random_reconnects_leave_no_gap(seed: int, harness: Harness, trial: Trial):
    """Whenever a subscriber comes back, with a new client or after a reset, it goes on behind what it saw."""
    chance = random.Random(seed)
    events: list[JobEvent] = []
    with Client(harness.stage.server.url) as submitter:
        job_id = _count(submitter, COUNT, DELAY_MS).id
        client = Client(harness.proxy.url)
        for _ in range(RECONNECTS):
            wanted = chance.randint(1, 6)
            for event in client.job(job_id).stream(after=events[-1].seq if events else 0):
                events.append(event)
                wanted -= 1
                if wanted <= 0 or event.is_terminal:
                    break
            if chance.random() < 0.5:
                harness.proxy.reset()
            else:
                client.close()
                client = Client(harness.proxy.url)
        events += client.job(job_id).stream(after=events[-1].seq)
        client.close()
    _check_whole(events, COUNT)
    assert all(earlier.seq + 1 == later.seq for earlier, later in pairwise(events))
    trial.note(times=RECONNECTS, jobs=1)


@pytest.mark.parametrize("seed", seeds(ways=2))
def test_slow_and_stopped_subscribers_delay_no_other_client(seed: int, harness: Harness, trial: Trial):
    """While one subscriber reads slowly and another not at all, jobs end as fast; both get the rest later."""
    url = harness.stage.server.url
    with Client(url) as submitter, Client(url) as slow, Client(url) as stopped, Client(url) as other:
        alone = _seconds(lambda: _count(submitter, COUNT, 1.0).result(180))
        job = _count(submitter, COUNT, 1.0)
        held, read = stopped.job(job.id).stream(), slow.job(job.id).stream()
        seen, late = [next(held)], [next(read)]

        def together() -> None:
            for _ in range(10 + seed % 10):
                late.append(next(read))
            job.result(180)

        seconds = _seconds(together)
        _check_whole([*other.job(job.id).stream()], COUNT)
        seen += held
        late += read
    _check_whole(seen, COUNT)
    _check_whole(late, COUNT)
    trial.recovered(seconds, within=1.5 * alone + 0.5)
    trial.note(times=2, jobs=2)


def _seconds(step: Callable[[], object]) -> float:
    begun = time.monotonic()
    step()
    return time.monotonic() - begun
