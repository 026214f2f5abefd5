"""stream(timeout=): how long a stream may go without an event, in both clients."""

from __future__ import annotations

import asyncio
import math
from math import inf
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client, InvalidInput, JobEvent, ResultTimeout
from penstock.producers.events import Silence
from penstock.registry.broker.base import Emission
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import EventHeader, seal
from penstock.registry.event_body import chunk_part, encode_parts
from tests.producers.answers import UNSIGNED, Claimed, claim, end, held
from tests.servers import RedisServer

X = np.ones((1, 4), np.float32)


def test_each_event_begins_the_time_anew():
    """The time runs only while the stream waits: the caller may take as long as it likes for an event."""
    silence = Silence(5)
    assert silence.left(100, 0) == 5
    assert silence.left(103, 0) == 2
    silence.broken()
    assert silence.left(1000, 2) == 5
    with pytest.raises(ResultTimeout) as late:
        silence.left(1005, 2)
    assert str(late.value) == "No event within 5 s; the job goes on. stream(after=2) continues"
    assert Silence(None).left(1e12, 0) == inf
    assert Silence(10**400).left(0, 0) > 1e8


@pytest.mark.parametrize("timeout", ["1", math.nan, True, [1]])
def test_a_timeout_that_is_no_number_is_refused(timeout: Any):
    """The text says what was found, and that None waits without a limit."""
    with pytest.raises(
        InvalidInput, match=r"^timeout is .*Expected a number of seconds, or None to wait without a limit"
    ):
        Silence(timeout)


def _events(kind: str, url: str, job_id: str, **arguments: Any) -> list[JobEvent | ResultTimeout]:
    """What a stream brings; a time-out is the last of it."""
    found: list[JobEvent | ResultTimeout] = []
    try:
        if kind == "blocking":
            with Client(url) as client:
                found.extend(client.job(job_id).stream(**arguments))
        else:
            asyncio.run(_gather_events(url, job_id, arguments, found))
    except ResultTimeout as late:
        found.append(late)
    return found


async def _gather_events(url: str, job_id: str, arguments: dict[str, Any], found: list[Any]) -> None:
    async with AsyncClient(url) as client:
        async for event in client.job(job_id).stream(**arguments):
            found.append(event)


def _emit_chunk(broker: RedisStreams, job: Claimed) -> None:
    body = encode_parts([chunk_part({"y": X}, None, 1000)])
    sealed = seal("event", EventHeader(job.header.id), body, UNSIGNED)
    broker.emit("test", [Emission(held(job), "run", sealed)], 60_000, max_bytes=1000)


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
@pytest.mark.parametrize("timeout", [0, 0.05])
def test_a_silent_stream_times_out_and_continues(
    timeout: float, kind: str, shared_redis: RedisServer, parked: str, broker: RedisStreams
):
    """The events so far come first; the job goes on, and a second stream has the rest without a gap."""
    with Client(shared_redis.url) as client:
        job_id = client.submit(parked, {"x": X}).id
    queued, late = _events(kind, shared_redis.url, job_id, timeout=timeout)
    assert isinstance(queued, JobEvent)
    assert (queued.seq, queued.type) == (1, "queued")
    assert str(late) == f"No event within {timeout:g} s; the job goes on. stream(after=1) continues"
    (claimed,) = claim(broker, parked)
    _emit_chunk(broker, claimed)
    *more, late = _events(kind, shared_redis.url, job_id, after=1, timeout=timeout)
    types = [event.type for event in more if isinstance(event, JobEvent)]
    assert (types[0], types[-1]) == ("started", "chunk")
    seen = more[-1]
    assert isinstance(seen, JobEvent)
    assert f"stream(after={seen.seq}) continues" in str(late)
    end(broker, claimed)
    (last,) = _events(kind, shared_redis.url, job_id, after=seen.seq, timeout=180)
    assert isinstance(last, JobEvent)
    assert last.type == "completed"
