"""Server-sent events: ids, replay behind the last one, heartbeats, a retry hint when the gateway stops."""

from __future__ import annotations

import json
import threading
from typing import Any

import httpx

from penstock.registry.queues import MODELS_KEY
from tests.producers.conftest import announce
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.servers import wait_until


def events(text: str) -> list[tuple[int, str, dict[str, Any]]]:
    """(id, event, data) of a whole stream."""
    found = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if ": " in line)
        if "id" in fields:
            found.append((int(fields["id"]), fields["event"], json.loads(fields["data"])))
    return found


def submit(http: httpx.Client, count: int) -> str:
    """A job that streams so many chunks; its location."""
    return str(http.post("/v1/jobs", json={"model": "counter", "inputs": {"count": [count]}}).headers["location"])


def test_events_come_in_order_with_ids(http: httpx.Client):
    """CX-038: queued or started, each chunk, the end with its outputs; then the stream is over."""
    location = submit(http, 5)
    found = http.get(f"{location}/events")
    assert found.headers["content-type"] == "text/event-stream"
    assert found.text.startswith("retry: ")
    stream = events(found.text)
    assert [name for _, name, _ in stream].count("chunk") == 5
    assert stream[-1][1] == "completed"
    assert stream[-1][2]["job_id"] == location.rpartition("/")[2]
    ids = [each for each, _, _ in stream]
    assert ids == sorted(set(ids))


def test_a_client_goes_on_behind_the_last_event(http: httpx.Client):
    """Last-Event-ID: the rest follows without gap and repeat. A client that saw the end gets 204, and stays away."""
    location = submit(http, 6)
    whole = events(http.get(f"{location}/events").text)
    for place in (1, 4):
        rest = http.get(f"{location}/events", headers={"Last-Event-ID": str(whole[place][0])})
        assert events(rest.text) == whole[place + 1 :]
    over = http.get(f"{location}/events", headers={"Last-Event-ID": str(whole[-1][0])})
    # RFC 9110 8.6: such an answer has no length.
    assert (over.status_code, over.headers.get("content-length")) == (204, None)
    assert http.get(f"{location}/events", headers={"Last-Event-ID": "x"}).status_code == 422


def test_a_head_request_does_not_wait_for_the_events(stack: GatewayStack, http: httpx.Client):
    """It has the head of the stream, though no worker ever ends the job."""
    announce(stack.server, "unserved-events")
    job = http.post("/v1/jobs", json={"model": "unserved-events", "inputs": {"x": [[1, 2, 3, 4]]}}).json()["id"]
    try:
        found = http.head(f"/v1/jobs/{job}/events")
        assert (found.status_code, found.headers["content-type"]) == (200, "text/event-stream")
        assert http.head("/v1/jobs/double.ffffffff-ffff-7fff-bfff-ffffffffffff/events").status_code == 404
    finally:
        with stack.server.client() as redis:
            redis.srem(MODELS_KEY, "unserved-events")
            redis.delete(*redis.scan_iter("{unserved-events}:*"))


def test_events_of_an_unknown_job_are_404(http: httpx.Client):
    """Before the first byte an error is an answer as of any route."""
    found = http.get("/v1/jobs/double.ffffffff-ffff-7fff-bfff-ffffffffffff/events")
    assert found.status_code == 404
    assert found.headers["content-type"] == "application/problem+json"


def test_a_failed_job_ends_its_stream_with_its_error(http: httpx.Client):
    """The end of a failed job has the code and no text of the model's own exception."""
    document = {"model": "raiser", "inputs": {"x": [[-1, 0, 0, 0]]}}
    location = http.post("/v1/jobs", json=document).headers["location"]
    *_, (_, name, data) = events(http.get(f"{location}/events").text)
    assert (name, data["error"]["code"]) == ("failed", "model-error")


def test_a_gateway_that_stops_ends_its_streams(stack: GatewayStack, start_gateway: StartGateway):
    """The client is told when to come back, and continues at another gateway where it was; nothing is lost."""
    gateway = start_gateway()
    with gateway.client() as http, stack.gateway.client() as other:
        # The job cannot end before the gateway does. A pause would reach the worker up to a second later.
        stack.worker.freeze()
        try:
            location = other.post("/v1/jobs", json=_nap(9)).headers["location"]
            lines: list[str] = []
            with http.stream("GET", f"{location}/events") as stream:
                received = stream.iter_lines()
                lines += [next(received) for _ in range(6)]
                gateway.terminate()
                lines += received
            assert gateway.wait(180) == 0
        finally:
            stack.worker.thaw()
        assert [line for line in lines if line][-1].startswith("retry: ")
        seen = events("\n".join(lines))
        rest = other.get(f"{location}/events", headers={"Last-Event-ID": str(seen[-1][0])})
        assert events(rest.text)[-1][1] == "completed"


def test_requests_that_wait_are_answered_before_a_gateway_stops(stack: GatewayStack, start_gateway: StartGateway):
    """SIGTERM: no new connection, and the answer of a running request still comes."""
    gateway = start_gateway()
    found: list[httpx.Response] = []

    def wait() -> None:
        with gateway.client() as http:
            found.append(http.post("/v1/models/napper:predict", json={"inputs": {"x": [[5, 5, 5, 5]]}}))

    thread = threading.Thread(target=wait)
    with stack.server.client() as redis:
        before = len(set(redis.scan_iter("{napper}:job:*")))
        thread.start()
        wait_until(lambda: len(set(redis.scan_iter("{napper}:job:*"))) > before, 30, "the job is accepted")
    gateway.terminate()
    thread.join()
    assert gateway.wait(180) == 0
    assert found[0].status_code == 200


def _nap(number: int) -> dict[str, Any]:
    return {"model": "napper", "inputs": {"x": [[number, 2, 2, 2]]}}
