"""SH-007, CX-004: a job's events, live, late, resumed, after a broken connection, from another process."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import AsyncClient, Client, EventType, JobEvent, JobHandle
from penstock.registry.errors import Cancelled, ModelError
from tests.conftest import StartWorker
from tests.flow.conftest import Fleet
from tests.servers import ROOT, RedisServer

TEN_STEPS = [
    (1, "queued"),
    (2, "started"),
    *[(3 + each, "chunk" if each % 2 == 0 else "progress") for each in range(20)],
    (23, "completed"),
]


def _count(client: Client, count: int, delay_ms: float = 0) -> JobHandle:
    return client.submit("counter", {"count": [count], "delay_ms": [float(delay_ms)]})


def _steps(events: Iterable[JobEvent]) -> list[tuple[int, str]]:
    return [(event.seq, event.type) for event in events]


def _values(events: Iterable[JobEvent]) -> list[int]:
    return [int(event.data["value"][0]) for event in events if event.type == "chunk"]


def _plain(event: JobEvent) -> tuple[int, str, Any]:
    data = (
        {name: values.tolist() for name, values in event.data.items()} if isinstance(event.data, dict) else event.data
    )
    return event.seq, event.type, data


def test_chunks_arrive_while_the_job_runs(client: Client):
    """The first chunk is seen long before the end, each in its turn, and the job is running then."""
    job = _count(client, 5, delay_ms=100)
    events: list[JobEvent] = []
    statuses: list[str] = []
    for event in job.stream():
        events.append(event)
        statuses.append(job.status())
    assert statuses[0] == "running"
    assert _values(events) == [1, 2, 3, 4, 5]
    assert [event.data for event in events if event.type == "progress"] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert events[-1].type == "completed"
    assert events[-1].data["total"].tolist() == [5]
    first_chunk = next(number for number, event in enumerate(events) if event.type == "chunk")
    assert statuses[first_chunk] == "running"


def test_late_subscriber_misses_nothing(client: Client, fleet: Fleet):
    """After completion, on this handle and on another client's, the whole sequence can be read again."""
    job = _count(client, 10)
    live = [_plain(event) for event in job.stream()]
    assert [step[:2] for step in live] == TEN_STEPS
    assert [_plain(event) for event in job.stream()] == live
    with Client(fleet.server.url) as other:
        assert [_plain(event) for event in other.job(job.id).stream()] == live


def test_subscriber_resumes_after_what_it_saw(client: Client):
    """For every event as the last one seen, the rest follows, without gap or repeat; after the end, nothing."""
    job = _count(client, 10)
    job.result(180)
    for last in range(24):
        assert _steps(job.stream(after=last)) == TEN_STEPS[last:]
    assert list(job.stream(after=1000)) == []


def test_no_chunk_is_lost_when_connections_break(client: Client, fleet: Fleet):
    """Every connection to the broker is cut ten times, the worker's and the subscriber's: all chunks, once each."""
    job = _count(client, 60, delay_ms=10)
    events = []
    with fleet.server.client() as redis:
        for event in job.stream():
            events.append(event)
            if event.type == "chunk" and event.data["value"][0] % 6 == 0:
                redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    assert _values(events) == list(range(1, 61))
    assert all(before.seq + 1 == after.seq for before, after in pairwise(events))
    assert events[-1].type == "completed"


def test_several_subscribers_see_the_same(client: Client):
    """Three threads of one client and the waiting result share its connection, and none takes from another."""
    job = _count(client, 20, delay_ms=5)
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(lambda: [_plain(event) for event in job.stream()]) for _ in range(3)]
        assert pool.submit(job.result, 10).result()["total"].tolist() == [20]
        first, second, third = (stream.result(180) for stream in streams)
    assert first == second == third
    assert [event[0] for event in first] == list(range(1, 44))


def test_asyncio_stream_gives_the_same(fleet: Fleet):
    """As the blocking client: live, and resumed by another client."""

    async def follow() -> tuple[list[tuple[int, EventType]], list[tuple[int, EventType]]]:
        async with AsyncClient(fleet.server.url) as client, AsyncClient(fleet.server.url) as other:
            job = await client.submit("counter", {"count": [10], "delay_ms": [5.0]})
            live = [(event.seq, event.type) async for event in job.stream()]
            return live, [(event.seq, event.type) async for event in other.job(job.id).stream(after=7)]

    live, resumed = asyncio.run(asyncio.wait_for(follow(), 20))
    assert live == TEN_STEPS
    assert resumed == TEN_STEPS[7:]


def test_stream_is_followed_in_another_process(client: Client, fleet: Fleet):
    """A process that has only the id follows the running job to its end."""
    job = _count(client, 30, delay_ms=50)
    program = f"""
from penstock import Client
for event in Client({fleet.server.url!r}).job({job.id!r}).stream():
    print(event.seq, event.type)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=180
    )
    assert done.stdout.splitlines() == [f"{seq} {kind}" for seq, kind in _steps(job.stream())]


def test_plain_job_has_a_stream_too(client: Client):
    """A job that emits nothing: its states; a failed one ends with its failure as data, which is not raised."""
    rows = np.ones((1, 4), np.float32)
    assert _steps(client.submit("double", {"x": rows}).stream()) == [(1, "queued"), (2, "started"), (3, "completed")]
    events = list(client.submit("raiser", {"x": -rows}).stream())
    assert _steps(events) == [(1, "queued"), (2, "started"), (3, "failed")]
    assert isinstance(events[-1].data, ModelError)
    assert events[-1].is_terminal


def test_running_job_is_asked_to_stop(client: Client):
    """cancel() of a running job promises nothing and says so; a model that looks at its context ends early."""
    job = _count(client, 1000, delay_ms=10)
    stream = job.stream()
    assert next(event for event in stream if event.type == "chunk")
    assert job.cancel() == "requested"
    end = list(stream)[-1]
    assert end.type == "cancelled"
    assert isinstance(end.data, Cancelled)
    assert job.status() == "cancelled"
    assert job.cancel() == "cancelled"


def test_stream_outlives_its_worker(shared_redis: RedisServer, models_root: Path, start_worker: StartWorker):
    """Another worker begins anew after a kill -9: subscribers get `reset`, and then a whole run, in one sequence."""
    shutil.copytree(ROOT / "models" / "counter", models_root / "counter")
    first = start_worker(shared_redis, models_root)
    with Client(shared_redis.url) as client:
        job = _count(client, 20, delay_ms=20)
        events = []
        for event in job.stream():
            events.append(event)
            if first.is_running and event.type == "chunk" and event.data["value"][0] == 5:
                first.kill()
                start_worker(shared_redis, models_root, wait=False)
        late = list(job.stream())
    assert [_plain(event) for event in events] == [_plain(event) for event in late]
    assert all(before.seq < after.seq for before, after in pairwise(events))
    reset = next(index for index, event in enumerate(events) if event.type == "reset")
    assert events[reset].data == "redelivered"
    assert _values(events[reset:]) == list(range(1, 21))
    assert events[-1].type == "completed"


def test_history_that_was_trimmed_is_announced(client: Client, fleet: Fleet):
    """A subscriber who missed more than is kept is told so, and gets the rest in order."""
    job = _count(client, 50, delay_ms=10)
    job.result(180)
    with fleet.server.client() as redis:
        (key,) = redis.keys(f"*{job.id.rpartition('.')[2]}:events")
        ends = [int(entry.partition(b"-")[0]) for entry, _ in redis.xrange(key)]
        # An entry has the number of its last event: the first one that stays is that behind the last one that goes.
        gone = ends[len(ends) // 2]
        redis.xtrim(key, minid=f"{gone + 1}-0", approximate=False)
    events = list(job.stream(after=2))
    assert (events[0].type, events[0].data, events[0].seq) == ("reset", "trimmed", gone)
    assert [event.seq for event in events[1:]] == list(range(gone + 1, 104))
