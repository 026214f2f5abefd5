"""A broker with one model, its task endpoint, and a drain in one function: for the tests of the task endpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.registry.admission import JobBuilder, SpecCache
from penstock.registry.broker.base import Claim, Commit, Delivery, Limits, State
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Failure, JobHeader, Keyring, ResultHeader, open_job, seal
from penstock.registry.tensors import decode, encode
from penstock.workers.celery_bridge.task_ingress import TaskIngress
from penstock.workers.celery_bridge.task_request import TaskRequests
from tests.servers import RedisServer

UNSIGNED = Keyring.parse(None)
LIMITS = Limits(max_depth=3, tenant_max_in_flight=0, job_ttl_ms=60_000)
ROWS = {"x": [[1.0, 2.0, 3.0, 4.0]]}


def task_requests(server: RedisServer, keyring: Keyring = UNSIGNED) -> TaskRequests:
    """The requests that the task endpoint keeps on this server."""
    return TaskRequests(server.client(), keyring, keep_ms=60_000, settled_ms=60_000)


def ingress(
    broker: RedisStreams, server: RedisServer, *, keyring: Keyring = UNSIGNED, is_open: bool = True
) -> TaskIngress:
    """The task endpoint of a worker on this broker."""
    builder = JobBuilder(tenant="default", keyring=keyring, max_bytes=1024)
    keep = task_requests(server, keyring).keep
    return TaskIngress(broker, builder, SpecCache(Path("nowhere")), LIMITS, keep, is_open=is_open)


def claim(broker: RedisStreams, slot: str) -> list[Delivery]:
    """The jobs that wait, claimed."""
    return broker.exchange("c:1", [], [Claim(slot, 16, 0, 1000)], 60_000)[1]


def finish(
    broker: RedisStreams,
    delivery: Delivery,
    state: State = State.COMPLETED,
    error: Failure | None = None,
) -> JobHeader:
    """Commit a claimed job as a drain would: twice its input, or a failure."""
    header, commit = commit_of(delivery, state, error)
    broker.exchange("c:1", [commit], [], 60_000)
    return header


def commit_of(
    delivery: Delivery, state: State = State.COMPLETED, error: Failure | None = None, keyring: Keyring = UNSIGNED
) -> tuple[JobHeader, Commit]:
    """The header of a claimed job, and what a drain would commit. keyring: seals the result, if it seals."""
    header, body = open_job(delivery.sealed, UNSIGNED)
    outputs = {} if error else {"y": decode(header.content, body)["x"] * np.float32(2)}
    content, answer = encode(outputs)
    result = ResultHeader(header.id, header.context, "1", "w", content, error, is_sealed=keyring.seals)
    return header, Commit(
        delivery.slot,
        delivery.priority,
        delivery.entry_id,
        header.id,
        state,
        seal("result", result, answer, keyring),
        header.tenant,
        header.reply,
    )
