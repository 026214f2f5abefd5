"""The Celery task endpoint, inwards: from a task message to a job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import InvalidTaskError

from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.envelope import Keyring, open_job
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
from penstock.workers.celery_bridge.task_ingress import InferRequest, InferTask
from tests.workers.celery_bridge.endpoint import ROWS, UNSIGNED, claim, finish, ingress
from tests.workers.celery_bridge.jobs import HOST

CANARY = "canary-payload"
SIGNED = Keyring.parse("k1:" + "A" * 43 + "=")


def test_a_task_becomes_a_job_under_its_own_id(broker: RedisStreams, slot: str):
    """The job has the task's arguments, and its reply address is the stream of the task endpoint."""
    job_id = ingress(broker).admit(
        "task-1", model=slot, inputs=ROWS, tenant="acme", priority="high", deadline_s=2.5, version="1", outputs=["y"]
    )
    assert job_id == f"{slot}.task-1"
    (delivery,) = claim(broker, slot)
    header, body = open_job(delivery.sealed, UNSIGNED)
    assert (header.id, header.tenant, header.priority, header.deadline_ms) == (job_id, "acme", "high", 2500)
    assert (header.version, header.options.outputs, header.options.lane) == ("1", ("y",), True)
    assert header.reply == lane_key(slot)
    assert decode(header.content, body)["x"].tolist() == ROWS["x"]


def test_the_same_task_again_is_the_same_job(broker: RedisStreams, slot: str):
    """Celery delivers a message again that was not acknowledged: nothing is queued twice, also after the job ran."""
    assert ingress(broker).admit("task-1", model=slot, inputs=ROWS) == ingress(broker).admit(
        "task-1", model=slot, inputs=ROWS
    )
    (delivery,) = claim(broker, slot)
    finish(broker, delivery)
    ingress(broker).admit("task-1", model=slot, inputs=ROWS)
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
    broker: RedisStreams, slot: str, change: dict[str, Any], error: type[Exception], text: str
):
    """Nothing is written, and the sender reads the reason."""
    arguments = {"task_id": "task-1", "model": slot, "inputs": ROWS, **change}
    with pytest.raises(error, match=text):
        ingress(broker).admit(arguments.pop("task_id"), **arguments)
    assert claim(broker, slot) == []


def test_a_full_queue_says_when_to_come_back(broker: RedisStreams, slot: str):
    """The error is QueueFull with a pause, because the task is to be tried again and not to fail."""
    endpoint = ingress(broker)
    for number in range(3):
        endpoint.admit(f"task-{number}", model=slot, inputs=ROWS)
    with pytest.raises(QueueFull) as refusal:
        endpoint.admit("task-3", model=slot, inputs=ROWS)
    assert refusal.value.retry_after_s > 0


def test_the_endpoint_is_closed_where_jobs_are_signed(broker: RedisStreams, slot: str):
    """Task messages have no signature: with signing keys the endpoint refuses them, unless the settings trust them."""
    with pytest.raises(Forbidden, match="send_task is off here"):
        ingress(broker, keyring=SIGNED, is_open=False).admit("task-1", model=slot, inputs=ROWS)
    ingress(broker, keyring=SIGNED).admit("task-1", model=slot, inputs=ROWS)
    (delivery,) = claim(broker, slot)
    assert open_job(delivery.sealed, SIGNED)[0].key == "k1"


def request_of(app: Celery, payload: object) -> InferRequest:
    """The request that a worker of `app` would make of a message with this payload."""

    def infer() -> None:
        """Takes the place of InferTask."""

    task = app.task(name="penstock.infer")(infer)
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


@pytest.mark.parametrize("payload", [[1], 7, None, {"a": 1}, "text"])
def test_a_payload_that_is_no_task_is_an_invalid_task_and_no_crash(app: Celery, payload: object):
    """Celery drops an InvalidTaskError; anything else would end the worker."""
    with pytest.raises(InvalidTaskError):
        request_of(app, payload)


def test_outside_a_worker_the_task_says_where_it_runs():
    """A process that imports the application and calls the task by itself has no broker behind it."""
    with pytest.raises(ConfigurationError, match="runs in a Penstock worker only"):
        InferTask().run("mlp", ROWS)
