"""Webhooks of jobs that were submitted over HTTP, as the libraries of receivers verify them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from penstock.registry.webhook_secrets import new_secret
from tests.deliverer_process import DelivererProcess
from tests.producers.gateway.conftest import GatewayStack
from tests.producers.gateway.test_jobs import ROW, job
from tests.receiver import Call, Receiver
from tests.servers import require_module, wait_until

SECRET = new_secret()


@pytest.fixture(scope="module")
def deliverer(stack: GatewayStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DelivererProcess]:
    """One for the shared server."""
    process = DelivererProcess(stack.server, tmp_path_factory.mktemp("webhooks") / "deliverer", SECRET)
    process.launch()
    yield process
    process.kill()


@pytest.fixture(scope="module")
def delivered(stack: GatewayStack, deliverer: DelivererProcess) -> dict[str, Call]:
    """The call of each job, by its id: two of a batch that complete, one that fails, and one that is cancelled."""
    with Receiver() as receiver, stack.gateway.client() as http:
        hook = {"webhook": receiver.url()}
        many = {"model": "double", "inputs": [{"x": [ROW]}] * 2, **hook}
        ids = [each["id"] for each in http.post("/v1/jobs:batch", json=many).json()["jobs"]]
        ids.append(http.post("/v1/jobs", json=job("raiser", [-1, 0, 0, 0], **hook)).json()["id"])
        stack.worker.freeze()
        try:
            # The frozen worker may have asked for one job before.
            http.post("/v1/jobs", json=job("napper", [9, 9, 9, 0]))
            ids.append(http.post("/v1/jobs", json=job("napper", [9, 9, 9, 1], **hook)).json()["id"])
            assert http.delete(f"/v1/jobs/{ids[-1]}").json()["status"] == "cancelled"
        finally:
            stack.worker.thaw()
        wait_until(lambda: len(receiver.calls) >= len(ids), 60, f"each job is told of\n{deliverer.tail()}")
        calls = {call.event["data"]["id"]: call for call in receiver.calls}
    assert calls.keys() == {*ids}
    return {job_id: calls[job_id] for job_id in ids}


def test_each_end_is_told_under_the_id_of_the_job(delivered: dict[str, Call], http: httpx.Client):
    """The event names the job that HTTP shows, and how it ended; it has no inputs and no outputs."""
    told = [call.event for call in delivered.values()]
    assert [event["data"]["status"] for event in told] == ["completed", "completed", "failed", "cancelled"]
    for event in told:
        shown = http.get(f"/v1/jobs/{event['data']['id']}").json()
        assert event["data"] == {name: shown[name] for name in ("id", "model", "status")}
        assert event["type"] == f"job.{shown['status']}"


def test_the_client_of_openai_unwraps_them(delivered: dict[str, Call]):
    """`client.webhooks.unwrap` gives the event, and refuses another body, another secret and another id."""
    openai = require_module("openai")
    with openai.OpenAI(api_key="none", webhook_secret=SECRET) as client:
        for call in delivered.values():
            event = client.webhooks.unwrap(call.body, call.headers)
            assert (event.id, event.type, event.data.id) == (call.id, call.event["type"], call.event["data"]["id"])
        forged: list[tuple[bytes, dict[str, str], str]] = [
            (call.body.replace(b"job.", b"bob."), dict(call.headers), SECRET),
            (call.body, dict(call.headers), new_secret()),
            (call.body, {**call.headers, "webhook-id": "evt_0_0"}, SECRET),
        ]
        for body, headers, secret in forged:
            with pytest.raises(openai.InvalidWebhookSignatureError):
                client.webhooks.unwrap(body, headers, secret=secret)


def test_the_library_of_the_standard_verifies_them(delivered: dict[str, Call]):
    """Standard Webhooks' own."""
    standard = require_module("standardwebhooks")
    library: Any = standard.Webhook(SECRET)
    for call in delivered.values():
        assert library.verify(call.body, call.headers) == json.loads(call.body)
        with pytest.raises(standard.WebhookVerificationError):
            library.verify(call.body + b" ", call.headers)
