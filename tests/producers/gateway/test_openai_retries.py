"""OpenAI's client with its own retries and time-outs: it waits as it is told, and leaves no job behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest

from penstock import Client
from penstock.registry.api_keys import KeyLimits, new_api_key
from penstock.registry.catalog.api_keys import SqlApiKeys
from penstock.registry.queues import meter_key
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.test_one_job import jobs_of
from tests.servers import require_module, wait_until

VECTOR = [letter / 255 for letter in b"abcd"]


@contextmanager
def openai_client(gateway: GatewayProcess, heard: Callable[[Any], None], **options: Any) -> Iterator[Any]:
    """OpenAI's client. heard: takes each answer, before the client decides about it."""
    openai = require_module("openai")
    http = openai.DefaultHttpxClient(event_hooks={"response": [heard]})
    with openai.OpenAI(base_url=f"{gateway.url}/v1", http_client=http, **{"api_key": "none", **options}) as client:
        yield client


def embed(client: Any) -> tuple[list[float], int]:
    """(the vector of a text, how often the client has repeated its request)."""
    raw = client.embeddings.with_raw_response.create(model="embedder", input="abcd", encoding_format="float")
    return raw.parse().data[0].embedding, raw.retries_taken


def test_a_spent_limit_is_waited_for(stack: GatewayStack, start_gateway: StartGateway, tmp_path: Any):
    """429: one retry suffices, since Retry-After says when there is room."""
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    made = new_api_key("retries", now=int(time.time()), limits=KeyLimits(requests_per_minute=1))
    SqlApiKeys(url).add(made.key)
    gateway = start_gateway(PENSTOCK_REGISTRY_URL=url, PENSTOCK_INFERENCE_SERVER_API_KEYS="required")
    statuses: list[tuple[int, str]] = []

    def heard(answer: Any) -> None:
        statuses.append((answer.status_code, answer.headers.get("retry-after", "")))

    with openai_client(gateway, heard, api_key=made.text) as client:
        with closing(stack.server.client()) as redis:
            # The minute was spent 58 s ago: there is room in three. The client's import takes longer on a busy machine.
            first = int(redis.time()[0]) - 58
            redis.hset(meter_key(f"key:{made.key.id}", "minute"), mapping={"first": first, "sum": 1, str(first): 1})
        vector, retries = embed(client)
    assert vector == pytest.approx(VECTOR)
    assert retries == 1
    assert [status for status, _ in statuses] == [429, 200]
    assert 1 <= int(statuses[0][1]) <= 3


def test_a_full_gateway_is_asked_again(stack: GatewayStack, start_gateway: StartGateway):
    """503 with Retry-After, while all places are taken; the answer comes when one is free."""
    gateway = start_gateway(PENSTOCK_INFERENCE_SERVER_MAX_WAITING="1")
    statuses: list[int] = []

    def heard(answer: Any) -> None:
        statuses.append(answer.status_code)
        if answer.status_code == 503:
            assert answer.headers["retry-after"] == "1"
            stack.worker.thaw()

    def wait() -> None:
        with gateway.client() as http:
            http.post("/v1/models/double:predict", json={"inputs": {"x": [[1, 2, 3, 4]]}})

    thread = threading.Thread(target=wait)
    stack.worker.freeze()
    try:
        thread.start()
        with gateway.client() as http:
            wait_until(lambda: "\npenstock_http_waiting 1.0" in http.get("/metrics").text, 30, "the place is taken")
        with openai_client(gateway, heard, max_retries=10) as client:
            vector, retries = embed(client)
    finally:
        stack.worker.thaw()
        thread.join()
    assert vector == pytest.approx(VECTOR)
    assert retries >= 1
    assert statuses == [503] * retries + [200]


@pytest.mark.parametrize("retries", [0, 1])
def test_a_client_that_gives_up_takes_its_jobs_along(stack: GatewayStack, retries: int):
    """Its time-out ends each try cleanly: the error is the client's own, and the job of each try is cancelled."""
    openai = require_module("openai")
    stack.worker.freeze()
    try:
        _occupy(stack)
        before = jobs_of(stack, "embedder")
        # Each try has been sent when it is given up.
        options = {"max_retries": retries, "timeout": openai.Timeout(120, read=0.5)}
        with openai_client(stack.gateway, lambda _: None, **options) as client, pytest.raises(openai.APITimeoutError):
            embed(client)
        with Client(stack.server.url) as penstock:

            def statuses() -> list[str]:
                return [penstock.job(each).status() for each in jobs_of(stack, "embedder") - before]

            wait_until(lambda: statuses().count("cancelled") == retries + 1, 30, "the job of each try is cancelled")
    finally:
        stack.worker.thaw()
    assert "request failed" not in stack.gateway.output.read_text()


def _occupy(stack: GatewayStack) -> None:
    """The frozen worker may have asked for one job before."""
    with Client(stack.server.url) as client:
        client.submit("embedder", {"text": ["abcd"]})
