"""The Celery task endpoint, inwards: from a task message to a job."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import InvalidTaskError
from celery.worker import state as worker_state

from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import JobHeader, Keyring, open_job
from penstock.registry.errors import (
    ConfigurationError,
    DeadlineExceeded,
    Forbidden,
    InvalidInput,
    QueueFull,
    UnknownModel,
)
from penstock.registry.queues import lane_key
from penstock.registry.tensors import decode
from penstock.workers.celery_bridge.task_ingress import InferRequest, InferTask, TaskIngress
from tests.servers import RedisServer
from tests.workers.celery_bridge.endpoint import ROWS, UNSIGNED, claim, finish, ingress, task_requests
from tests.workers.celery_bridge.jobs import HOST
from tests.workers.celery_bridge.program import Program

CANARY = "canary-payload"
SIGNED = Keyring.parse("k1:" + "A" * 43 + "=")


@pytest.fixture
def endpoint(broker: RedisStreams, shared_redis: RedisServer) -> TaskIngress:
    """The open task endpoint of a worker."""
    return ingress(broker, shared_redis)


def test_a_task_becomes_a_job_under_its_own_id(endpoint: TaskIngress, broker: RedisStreams, slot: str):
    """The job has the task's arguments, and its reply address is the stream of the task endpoint."""
    job_id = endpoint.admit(
        "task-1", model=slot, inputs=ROWS, tenant="acme", priority="high", deadline_s=2.5, version="1", outputs=["y"]
    )
    assert job_id == f"{slot}.task-1"
    (delivery,) = claim(broker, slot)
    header, body = open_job(delivery.sealed, UNSIGNED)
    assert (header.id, header.tenant, header.priority, header.deadline_ms) == (job_id, "acme", "high", 2500)
    assert (header.version, header.options.outputs, header.options.lane) == ("1", ("y",), True)
    assert header.reply == lane_key(slot)
    assert decode(header.content, body)["x"].tolist() == ROWS["x"]


def test_the_same_task_again_is_the_same_job(endpoint: TaskIngress, broker: RedisStreams, slot: str):
    """Celery delivers a message again that was not acknowledged: nothing is queued twice, also after the job ran."""
    assert endpoint.admit("task-1", model=slot, inputs=ROWS) == endpoint.admit("task-1", model=slot, inputs=ROWS)
    (delivery,) = claim(broker, slot)
    finish(broker, delivery)
    endpoint.admit("task-1", model=slot, inputs=ROWS)
    assert claim(broker, slot) == []


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"model": "missing"}, UnknownModel, "Unknown model 'missing'"),
        ({"model": "../etc"}, InvalidInput, "Bad model name"),
        ({"model": 7}, InvalidInput, "Bad model name"),
        ({"inputs": {"z": [[1.0]]}}, InvalidInput, "Missing required input"),
        ({"inputs": [1.0]}, InvalidInput, "Expected a mapping"),
        ({"inputs": {"x": [[1.0, 2.0]]}}, InvalidInput, "shape"),
        ({"inputs": {"x": [[0.0] * 4] * 100}}, InvalidInput, "Expected at most 1024"),
        ({"priority": "urgent"}, InvalidInput, "Unknown priority"),
        ({"priority": ["high"]}, InvalidInput, "Unknown priority"),
        ({"tenant": "Not Me"}, InvalidInput, "Bad tenant name"),
        ({"deadline_s": -1}, DeadlineExceeded, "Expected a positive number"),
        ({"deadline_s": "soon"}, InvalidInput, "deadline_s is a str. Expected seconds"),
        ({"deadline_s": float("nan")}, DeadlineExceeded, "Expected a positive number"),
        ({"version": "2"}, UnknownModel, "Expected version: 1"),
        ({"outputs": ["z"]}, InvalidInput, "Unknown output"),
        ({"task_id": "no spaces please"}, InvalidInput, "Bad job id"),
    ],
)
def test_a_task_that_cannot_be_accepted_is_rejected_with_the_expected_value(
    endpoint: TaskIngress,
    broker: RedisStreams,
    slot: str,
    change: dict[str, Any],
    error: type[Exception],
    text: str,
):
    """Nothing is written, and the sender reads the reason."""
    arguments = {"task_id": "task-1", "model": slot, "inputs": ROWS, **change}
    with pytest.raises(error, match=text):
        endpoint.admit(arguments.pop("task_id"), **arguments)
    assert claim(broker, slot) == []


def test_a_full_queue_says_when_to_come_back(endpoint: TaskIngress, slot: str):
    """The error is QueueFull with a pause, because the task is to be tried again and not to fail."""
    for number in range(3):
        endpoint.admit(f"task-{number}", model=slot, inputs=ROWS)
    with pytest.raises(QueueFull) as refusal:
        endpoint.admit("task-3", model=slot, inputs=ROWS)
    assert refusal.value.retry_after_s > 0


def test_the_endpoint_is_closed_where_jobs_are_signed(shared_redis: RedisServer, broker: RedisStreams, slot: str):
    """Task messages have no signature: with signing keys the endpoint refuses them, unless the settings trust them."""
    with pytest.raises(Forbidden, match="send_task is off here"):
        ingress(broker, shared_redis, keyring=SIGNED, is_open=False).admit("task-1", model=slot, inputs=ROWS)
    ingress(broker, shared_redis, keyring=SIGNED).admit("task-1", model=slot, inputs=ROWS)
    (delivery,) = claim(broker, slot)
    assert open_job(delivery.sealed, SIGNED)[0].key == "k1"


def request_of(app: Celery, payload: object) -> InferRequest:
    """The request that a worker of `app` would make of a message with this payload."""

    def infer() -> None:
        """Takes the place of InferTask."""

    task = app.task(name="penstock.infer", shared=False)(infer)
    message = SimpleNamespace(
        headers={"id": "t1", "task": "penstock.infer", "kwargsrepr": CANARY, "argsrepr": CANARY},
        body=b"",
        payload=payload,
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={},
        properties={},
    )
    return InferRequest(message, app=app, hostname=HOST, task=task)


def test_the_request_of_a_task_shows_no_payload(app: Celery):
    """Neither Celery's events, which carry argsrepr and kwargsrepr, nor `inspect active` nor repr have the inputs."""
    request = request_of(app, [[], {"model": "mlp", "inputs": {"x": CANARY}}, {}])
    shown = [request.argsrepr, request.kwargsrepr, request.info(), request.info(safe=True), repr(request)]
    shown += [request.request_dict["argsrepr"], request.request_dict["kwargsrepr"]]
    assert CANARY not in repr(shown)
    assert request.kwargsrepr == "{'model': 'mlp'}"


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("mlp", "penstock.infer.mlp"),
        ("../etc", "penstock.infer"),
        (7, "penstock.infer"),
        (None, "penstock.infer"),
        ("x" * 80, "penstock.infer"),
    ],
)
def test_monitors_list_a_task_under_its_model(app: Celery, model: object, name: str):
    """The name is that of its job, but not any text that a message brings."""
    assert request_of(app, [[], {"model": model}, {}]).name == name


def test_a_task_that_is_taken_counts_as_no_running_task(app: Celery):
    """Its job is counted when it ends, by the worker that ran it."""
    request = request_of(app, [[], {"model": "mlp"}, {}])
    before = worker_state.all_total_count[0]
    request.on_accepted(4711, 0.0)
    assert (request.worker_pid, worker_state.all_total_count[0]) == (4711, before)
    assert request not in worker_state.active_requests


@pytest.mark.parametrize("payload", [[1], 7, None, {"a": 1}, "text"])
def test_a_payload_that_is_no_task_is_an_invalid_task_and_no_crash(app: Celery, payload: object):
    """Celery drops an InvalidTaskError; anything else would end the worker."""
    with pytest.raises(InvalidTaskError):
        request_of(app, payload)


def test_outside_a_worker_the_task_says_where_it_runs():
    """A process that imports the application and calls the task by itself has no broker behind it."""
    with pytest.raises(ConfigurationError, match="runs in a Penstock worker only"):
        InferTask().run(model="mlp", inputs=ROWS)


# Options of a message


def header_of(program: Program) -> JobHeader:
    """The header of the only job that waits."""
    (delivery,) = claim(program.broker, program.slot)
    return open_job(delivery.sealed, UNSIGNED)[0]


@pytest.mark.parametrize(
    ("deadline_s", "earliest_ms", "latest_ms"), [(None, 1, 300_000), (60, 60_000, 60_000), (900, 1, 300_000)]
)
def test_expires_is_the_deadline_of_the_job(
    program: Program, deadline_s: float | None, earliest_ms: int, latest_ms: int
):
    """`expires` and `deadline_s` both limit the wait; the earlier one counts."""
    program.infer(kwargs={"deadline_s": deadline_s}).apply_async(expires=300)
    program.take()
    assert earliest_ms <= header_of(program).deadline_ms <= latest_ms


def test_an_expired_message_is_revoked(program: Program):
    """Celery revokes it before it becomes a job."""
    result = program.infer().apply_async(expires=datetime.now(UTC) - timedelta(seconds=1))
    program.take()
    state, error = program.ended(result)
    assert (state, str(error)) == ("REVOKED", "expired")
    assert claim(program.broker, program.slot) == []


def test_a_far_expiry_is_no_error(program: Program):
    """It lies beyond the lifetime of any job."""
    program.infer().apply_async(expires=datetime.now(UTC) + timedelta(days=4000))
    program.take()
    assert header_of(program).deadline_ms == 365 * 86_400_000


@pytest.mark.parametrize("option", ["time_limit", "soft_time_limit"])
def test_time_limits_are_refused(program: Program, option: str):
    """A forward serves many jobs, so one of them cannot end it. The sender reads what limits a job instead."""
    result = program.infer().apply_async(**{option: 5})
    program.take()
    state, error = program.ended(result)
    assert (state, type(error)) == ("FAILURE", InvalidInput)
    assert "Expected no time limit; `timeout_s` in model.yaml" in str(error)
    assert claim(program.broker, program.slot) == []


def test_too_many_positional_arguments_are_refused(program: Program):
    """All but the inputs are named."""
    result = program.infer(program.slot, ROWS).apply_async()
    program.take()
    assert "2 positional arguments. Expected one at most" in str(program.ended(result)[1])


def test_missing_inputs_are_refused(program: Program):
    """The text names the argument."""
    result = program.infer(is_handed_on=True).apply_async()
    program.take()
    assert "There are no inputs. Expected `inputs`" in str(program.ended(result)[1])


def test_options_that_do_not_concern_the_job_are_accepted(program: Program):
    """The priority orders the messages in Celery's queue, `shadow` is the name in monitors, `retries` is a number that
    nothing reads, and headers reach errbacks only.
    """
    result = program.infer().apply_async(priority=6, shadow="my name", retries=2, headers={"order": "o-17"}, retry=True)
    (raw,) = [
        message for key in program.redis.keys(f"{program.tasks}*") for message in program.redis.lrange(key, 0, -1)
    ]
    assert json.loads(raw)["properties"]["priority"] == 6
    request = program.take()
    assert (request.name, request.request_dict["retries"]) == ("my name", 2)
    (kept,) = task_requests(program.server).find([f"{program.slot}.{result.id}"])
    assert b'"order": "o-17"' in (kept or b"")
    assert header_of(program).priority == "normal"


TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("sent", "carried"), [(TRACE, TRACE), (None, ""), ("", ""), ("00-none", ""), (TRACE.upper(), ""), ({"a": 1}, "")]
)
def test_the_trace_of_a_message_is_that_of_its_job(program: Program, sent: object, carried: str):
    """OpenTelemetry's instrumentation of Celery writes it into the headers. A bad one makes no task fail."""
    program.infer().apply_async(headers={"traceparent": sent} if sent is not None else {})
    program.take()
    assert header_of(program).traceparent == carried


def test_a_revoked_message_becomes_no_job(program: Program):
    """`control revoke` reaches a task that waits for its `eta` or in Celery's queue."""
    result = program.infer().apply_async()
    worker_state.revoked.add(result.id)
    program.take()
    state, error = program.ended(result)
    assert (state, str(error)) == ("REVOKED", "revoked")
    assert claim(program.broker, program.slot) == []


def test_a_message_that_comes_again_at_its_eta_is_one_job(program: Program):
    """While a message waits for its `eta`, Celery's transport delivers it again and again; each copy is due then."""
    program.infer().apply_async(countdown=120)
    (message,) = program.redis.lrange(program.tasks, 0, -1)
    program.redis.lpush(program.tasks, message)
    assert program.take().eta == program.take().eta
    assert len(claim(program.broker, program.slot)) == 1
