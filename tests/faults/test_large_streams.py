"""F19: streams go beyond their bounds: 20,000 chunks, small or 40 MB in all, late subscribers, a worker that dies."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from penstock import Client, JobEvent, JobHandle
from penstock.registry.queues import events_key
from penstock.registry.settings_sections import QueueConfig
from tests.faults.conftest import OpenStage, Stage, Trial
from tests.faults.rounds import seeds
from tests.faults.streaming_models import open_flood

CHUNKS = 20_000
SIZE = 2_000
"""Bytes of a large chunk: together they are more than the broker keeps."""
CAP = QueueConfig().max_event_bytes
SMALL_CAP = 1 << 20
PATIENCE_S = 180.0


@pytest.fixture(scope="module")
def stage(open_stage: OpenStage) -> Stage:
    """One worker with the bounds that are the default."""
    stage = open_flood(open_stage)
    stage.start_worker()
    return stage


def _flood(client: Client, count: int, size: int, dies_at: int = -1) -> JobHandle:
    return client.submit("flood", {"count": [count], "size": [size], "dies_at": [dies_at]})


def _numbers(events: list[JobEvent]) -> list[int]:
    return [int.from_bytes(event.data["n"][:4].tobytes(), "little") for event in events if event.type == "chunk"]


def _kept_bytes(stage: Stage, job: JobHandle) -> int:
    with stage.server.client() as redis:
        return int(redis.memory_usage(events_key(job.id), samples=0))


def _entries(stage: Stage, job: JobHandle) -> int:
    with stage.server.client() as redis:
        return int(redis.xlen(events_key(job.id)))


@pytest.mark.parametrize("seed", seeds())
def test_twenty_thousand_small_chunks_are_all_kept(seed: int, client: Client, stage: Stage, trial: Trial):
    """They travel together and are replayed whole, to a live subscriber, to a late one, and to one that comes back
    wherever it left, also inside of what travelled together."""
    chance = random.Random(seed)
    job = _flood(client, CHUNKS, 4)
    live = [*job.stream()]
    assert [event.seq for event in live] == [*range(1, CHUNKS + 4)]
    assert _numbers(live) == [*range(CHUNKS)]
    assert _numbers([*job.stream()]) == [*range(CHUNKS)]
    for after in [2, 3, *chance.sample(range(4, CHUNKS), 8)]:
        events = job.stream(after=after)
        assert [next(events).seq for _ in range(3)] == [after + 1, after + 2, after + 3]
    assert _entries(stage, job) < CHUNKS / 20
    assert _kept_bytes(stage, job) < 64 * CHUNKS
    trial.note(times=1, jobs=1)


@pytest.mark.parametrize("seed", seeds())
def test_late_subscriber_of_a_long_stream_is_told_what_is_gone(seed: int, client: Client, stage: Stage, trial: Trial):
    """The broker keeps the last 16 MiB of 40 MB: a reset says so, and everything after it is there, in order."""
    job = _flood(client, CHUNKS, SIZE)
    job.result(PATIENCE_S)
    assert _kept_bytes(stage, job) < 1.2 * CAP
    late = [*job.stream(after=seed % 3)]
    reset = next(number for number, event in enumerate(late) if event.type == "reset")
    assert late[reset].data == "trimmed"
    kept = _numbers(late[reset:])
    assert [event.seq for event in late[reset:]] == [*range(late[reset].seq, CHUNKS + 4)]
    assert kept == [*range(CHUNKS - len(kept), CHUNKS)]
    assert len(kept) * SIZE > 0.9 * CAP
    assert late[-1].type == "completed"
    trial.note(times=1, jobs=1)


@pytest.mark.parametrize("seed", seeds())
def test_live_subscriber_of_a_long_stream_sees_each_chunk_at_most_once(
    seed: int, client: Client, stage: Stage, trial: Trial
):
    """However far it falls behind: numbers only rise, and each gap begins with a reset."""
    job = _flood(client, CHUNKS, SIZE)
    events = []
    for event in job.stream():
        events.append(event)
        if event.seq == 50 * seed:
            job.result(PATIENCE_S)
    for before, after in pairwise(events):
        assert before.seq < after.seq
        assert after.seq == before.seq + 1 or after.data == "trimmed"
    assert _numbers(events)[-1] == CHUNKS - 1
    trial.note(times=1, jobs=1)


@pytest.mark.parametrize("seed", seeds())
def test_bounds_hold_over_the_runs_of_a_job(seed: int, open_stage: OpenStage, trial: Trial):
    """The worker dies in the middle: the second run writes its own bytes, and both together stay within the bound."""
    stage = open_flood(open_stage)
    worker = stage.start_worker(is_supervised=True, PENSTOCK_INFERENCE_QUEUE_MAX_EVENT_BYTES=str(SMALL_CAP))
    with Client(stage.server.url) as client:
        job = _flood(client, 3000, SIZE, dies_at=1000 + 100 * (seed % 20))
        job.result(PATIENCE_S)
        assert job.info().attempt == 2
        assert _kept_bytes(stage, job) < 1.2 * SMALL_CAP
        late = [*job.stream()]
    resets = [event.data for event in late if event.type == "reset"]
    assert resets[0] == "trimmed"
    kept = _numbers(late)
    assert kept == [*range(3000 - len(kept), 3000)]
    assert worker.is_running
    stage.close()
    trial.note(times=1, jobs=1)
