"""What a request says of its job is in the envelope, whatever the protocol: read where a worker would claim it."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from websockets.asyncio.client import connect

from penstock.registry.api_keys import new_api_key
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.api_keys import SqlApiKeys
from penstock.registry.envelope import JobHeader, Keyring, Options, Retry, open_job
from tests.conformance.jobs import claim
from tests.gateway_process import GatewayProcess
from tests.producers.conftest import announce
from tests.producers.gateway.rpc.conftest import INFER, PREDICT, infer_request, predict_request
from tests.servers import RedisServer, redis_binaries, require, wait_until

MODEL = "fields"
TENANT = "initech"
TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
ROW = [1.0, 2.0, 3.0, 4.5]
OIP = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": ROW}], "outputs": [{"name": "y"}]}
HOOK = "https://example.com/hook"


class Desk(NamedTuple):
    """A gateway that asks for keys, with the one of a tenant, and a model whose jobs only this test claims."""

    gateway: GatewayProcess
    broker: RedisStreams

    headers: dict[str, str]

    def next_header(self) -> JobHeader:
        """The header of the next job, as soon as it is published."""
        (delivery,) = wait_until(lambda: claim(self.broker, "test", MODEL), 60, "a job is published")
        header, _ = open_job(delivery.sealed, Keyring.parse(None))
        assert delivery.priority.name.lower() == header.priority
        return header

    @contextmanager
    def asked(self, path: str, document: Any, **headers: str) -> Iterator[None]:
        """A POST that waits inside the block for an answer, which it never gets. Its key keeps the job."""
        with httpx.Client(base_url=self.gateway.url, headers=self.headers | headers, timeout=180) as client:
            request = client.build_request("POST", path, json=document)
            url = httpx.URL(self.gateway.url)
            lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in request.headers.items())]
            with socket.create_connection((url.host, url.port or 80), 30) as connection:
                connection.sendall("\r\n".join([*lines, "", ""]).encode() + request.content)
                yield


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """On a server of its own."""
    folder = tmp_path_factory.mktemp("fields")
    server = RedisServer(require(next(iter(redis_binaries().values()), None), "redis-server")).start()
    announce(server, MODEL)
    url = f"sqlite:///{folder / 'registry.db'}"
    made = new_api_key("fields", now=int(time.time()), tenant=TENANT)
    SqlApiKeys(url).add(made.key)
    environment = {"PENSTOCK_REGISTRY_URL": url, "PENSTOCK_INFERENCE_SERVER_API_KEYS": "required"}
    gateway = GatewayProcess(server, folder, environment=environment)
    broker = RedisStreams.from_url(server.url)
    try:
        yield Desk(gateway.start(), broker, {"X-API-Key": made.text, "traceparent": TRACE})
    finally:
        gateway.stop()
        broker.close()
        server.stop()


def facts(header: JobHeader) -> dict[str, Any]:
    """What the tests compare."""
    return {
        "tenant": header.tenant,
        "priority": header.priority,
        "deadline_ms": header.deadline_ms,
        "version": header.version,
        "traceparent": header.traceparent,
        "options": header.options,
    }


def expected(**others: Any) -> dict[str, Any]:
    """Of a request with a priority, a deadline and an output."""
    return {
        "tenant": TENANT,
        "priority": "high",
        "deadline_ms": 90_000,
        "version": "",
        "traceparent": TRACE,
        "options": Options(outputs=("y",)),
        **others,
    }


def test_jobs_have_all_fields(desk: Desk):
    """/v1/jobs, and each job of /v1/jobs:batch."""
    fields = {
        "model": MODEL,
        "version": "1",
        "outputs": ["y"],
        "priority": "high",
        "deadline_s": 90,
        "webhook": HOOK,
        "retry": {"attempts": 5, "backoff_s": 1, "longest_s": 9},
        "sticky_key": "user 7",
        "endpoint": "bulk",
    }
    options = Options(("y",), retry=Retry(5, 1, 9), webhook=HOOK, sticky_key="user 7", endpoint="bulk")
    with desk.gateway.client() as http:
        http.headers.update(desk.headers)
        one = http.post("/v1/jobs", json={**fields, "inputs": {"x": [ROW]}}, headers={"Idempotency-Key": "one"})
        assert one.status_code == 202, one.text
        first = desk.next_header()
        assert first.id == one.json()["id"]
        many = {**fields, "inputs": [{"x": [ROW]}], "idempotency_keys": ["two"]}
        batch = http.post("/v1/jobs:batch", json=many)
        assert batch.status_code == 202, batch.text
        second = desk.next_header()
        assert second.id == batch.json()["jobs"][0]["id"]
    for header in (first, second):
        assert facts(header) == expected(version="1", options=options)
    assert len({"", first.idempotency_digest, second.idempotency_digest}) == 3


def test_protocols_have_their_fields(desk: Desk):
    """Each has its own words for priority and deadline, and the same digest for the same key."""
    prediction: dict[str, Any] = {"inputs": {"x": [ROW]}, "outputs": ["y"], "priority": "high", "timeout_ms": 90_000}
    infer: dict[str, Any] = {**OIP, "parameters": {"priority": 2, "timeout": 90_000_000}}
    digests = []
    for number, (path, document, version) in enumerate(
        [
            (f"/v1/models/{MODEL}:predict", prediction, ""),
            (f"/v1/models/{MODEL}/versions/1:predict", prediction, "1"),
            (f"/v2/models/{MODEL}/infer", infer, ""),
            (f"/v2/models/{MODEL}/versions/1/infer", infer, "1"),
        ]
    ):
        with desk.asked(path, document, **{"Idempotency-Key": f"waiting-{number}"}):
            header = desk.next_header()
        assert facts(header) == expected(version=version), path
        digests.append(header.idempotency_digest)
    for path, name in (("/predict", "inputs"), ("/predict/batch", "batch")):
        rows = {name: ROW if name == "inputs" else [ROW]}
        with desk.asked(f"{path}?model={MODEL}", rows, **{"Idempotency-Key": path}):
            header = desk.next_header()
        assert (header.tenant, header.priority) == (TENANT, "normal")
        digests.append(header.idempotency_digest)
    assert len({"", *digests}) == len(digests) + 1
    with desk.asked(f"/v1/models/{MODEL}:predict", prediction):
        assert desk.next_header().idempotency_digest == ""


def test_messages_have_their_fields(desk: Desk):
    """Of a WebSocket, with the trace of the handshake."""

    async def run() -> JobHeader:
        address = f"{desk.gateway.url.replace('http', 'ws')}/predict/stream"
        async with connect(address, additional_headers=desk.headers) as connection:
            request = {"model": MODEL, "inputs": {"x": [ROW]}, "outputs": ["y"], "priority": "high"}
            await connection.send(json.dumps({**request, "timeout_ms": 90_000, "idempotency_key": "message"}))
            return await asyncio.to_thread(desk.next_header)

    header = asyncio.run(run())
    assert facts(header) == expected()
    assert header.idempotency_digest


def test_calls_have_their_fields(desk: Desk):
    """Of gRPC: of two deadlines, that of the job and that of the call, the earlier one counts."""
    metadata = [(name.lower(), value) for name, value in desk.headers.items()]
    infer = infer_request(MODEL)
    infer.outputs.add(name="y")
    infer.parameters["priority"].uint64_param = 2
    infer.parameters["timeout"].int64_param = 90_000_000
    with grpc.insecure_channel(desk.gateway.rpc) as channel:
        for method, request, key in ((INFER, infer, "call"), (PREDICT, predict_request(model=MODEL), "row")):
            more = [*metadata, ("idempotency-key", key)]
            call = channel.unary_unary(method).future(
                request.SerializeToString(), 600, metadata=more, wait_for_ready=True
            )
            header = desk.next_header()
            call.cancel()
            assert header.idempotency_digest
            if method == INFER:
                assert facts(header) == expected()
            else:
                assert (header.tenant, header.options) == (TENANT, Options(("y",)))
                # The client rounds its deadline up.
                assert 0 < header.deadline_ms <= 610_000
