"""Hostile messages through a real worker's loop: it survives, dead-letters every one of them, and serves on."""

from __future__ import annotations

import json
import time
from random import Random
from typing import Any, NamedTuple

import redis

from penstock import Client
from penstock.registry.queues import CELERY_QUEUE, CELERY_TASK, dead_key, stream_keys
from tests.servers import WorkerProcess, wait_until
from tests.threats import fuzz

GOOD_ROW = {"x": [[1.0, 2.0, 3.0, 4.0]]}
_AT_ONCE = 250
_PATIENCE_S = 60.0


class HostileLoad(NamedTuple):
    """What became of the messages."""

    sent: int
    dead_lettered: int
    slowest_good_s: float
    """Of the jobs that were sent between them, submit to result."""
    seconds: float


def send_hostile_entries(worker: WorkerProcess, client: Client, random: Random, count: int) -> HostileLoad:
    """Sends `count` hostile entries to the queues of `double`, and a good job after each few hundred.

    Fails the test when the worker ends, keeps an entry, or does not answer a good job.
    """
    begun, slowest, sent = time.monotonic(), 0.0, 0
    with worker.server.client(timeout_s=30) as overseer:
        before = overseer.xlen(dead_key(fuzz.MODEL))
        while sent < count:
            batch = min(_AT_ONCE, count - sent)
            with overseer.pipeline(transaction=False) as pipeline:
                for _ in range(batch):
                    queue = random.choice(stream_keys(fuzz.MODEL))
                    pipeline.execute_command("XADD", queue, "*", *_fields(random))
                pipeline.execute()
            sent += batch
            asked = time.monotonic()
            answer = client.submit(fuzz.MODEL, GOOD_ROW, priority="critical").result(_PATIENCE_S)["y"]
            slowest = max(slowest, time.monotonic() - asked)
            assert answer.tolist() == [[2, 4, 6, 8]]
            assert worker.is_running, worker.tail()
        wait_until(lambda: not sum(map(overseer.xlen, stream_keys(fuzz.MODEL))), _PATIENCE_S, "the queues are empty")
        dead_lettered = overseer.xlen(dead_key(fuzz.MODEL)) - before
    assert worker.is_running, worker.tail()
    return HostileLoad(sent, dead_lettered, slowest, time.monotonic() - begun)


def _fields(random: Random) -> list[bytes]:
    """The fields of an entry: nearly always one envelope, as ours are."""
    sealed = fuzz.envelope(random)
    kind = random.random()
    if kind < 0.97:
        return [b"e", sealed]
    if kind < 0.98:
        return [b"other", sealed]
    return [b"e", sealed, b"e", b"", *([b"more", b"x"] * random.randrange(3))]


def send_hostile_tasks(worker: WorkerProcess, random: Random, count: int, *, broken: int) -> None:
    """Sends `count` tasks with hostile arguments to the lane's Celery queue, and `broken` messages that are no task.

    The worker takes them all; after one that kombu cannot read, Celery's side of it reconnects, which takes a second.
    """
    kinds = [True] * count + [False] * broken
    random.shuffle(kinds)
    with worker.server.client(timeout_s=30) as overseer:
        for is_task in kinds:
            overseer.lpush(CELERY_QUEUE, _task(random) if is_task else _broken_task(random))
        wait_until(lambda: not _waiting(overseer), _PATIENCE_S + 2 * broken, "the lane's queue is empty")
    assert worker.is_running, worker.tail()


def _waiting(overseer: redis.Redis) -> int:
    return int(overseer.llen(CELERY_QUEUE)) + int(overseer.hlen(f"{CELERY_QUEUE}:unacked"))


def _task(random: Random) -> bytes:
    """A message of kombu's Redis transport whose arguments were changed."""
    return json.dumps(_frame(random)).encode()


def _broken_task(random: Random) -> bytes:
    """One whose frame was changed, or no such thing at all."""
    if random.random() < 0.5:
        return json.dumps(fuzz.mutated(random, _frame(random))).encode()
    return fuzz.damaged(random, _task(random), b"[" * 2_000)


def _frame(random: Random) -> dict[str, Any]:
    number = random.randrange(10**12)
    arguments = fuzz.arguments_of(fuzz.lane_message(random)) or {}
    headers = {"lang": "py", "task": CELERY_TASK, "id": f"fuzz-{number}", "root_id": f"fuzz-{number}"}
    return {
        "body": json.dumps([[], arguments, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]),
        "content-encoding": "utf-8",
        "content-type": "application/json",
        "headers": headers,
        "properties": {
            "correlation_id": f"fuzz-{number}",
            "delivery_info": {"exchange": "", "routing_key": CELERY_QUEUE},
            "delivery_mode": 2,
            "delivery_tag": f"tag-{number}",
            "priority": 0,
            "body_encoding": "utf-8",
        },
    }
