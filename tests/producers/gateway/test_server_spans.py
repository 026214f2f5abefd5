"""AR-015: the spans of requests that end in other ways than with an answer, and whose process they are of."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, Sampler

from penstock.compose.api_server import ApiServer
from penstock.producers.gateway import application
from penstock.producers.gateway.application import Gateway
from penstock.registry.settings import Settings
from tests.producers.gateway.conftest import GatewayStack

PATIENCE_S = 180.0
JOB = json.dumps({"model": "double", "inputs": {"x": [[1.0, 2.0, 3.0, 4.0]]}}).encode()


class Program:
    """The application in a program with a provider of its own."""

    def __init__(self, stack: GatewayStack, monkeypatch: pytest.MonkeyPatch, sampler: Sampler = ALWAYS_ON) -> None:
        self._exporter, provider = InMemorySpanExporter(), TracerProvider(sampler=sampler)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        # A process has one provider for good: these tests give each program its own.
        monkeypatch.setattr(application, "tracer_of", lambda: provider.get_tracer("penstock"))
        self.settings = settings(stack)

    @property
    def spans(self) -> list[ReadableSpan]:
        """Those that have ended."""
        return list(self._exporter.get_finished_spans())

    def run(self, ask: Callable[[Gateway], Any]) -> Any:
        """What a coroutine function makes of the application."""

        async def within() -> Any:
            gateway = Gateway(self.settings)
            try:
                async with asyncio.timeout(PATIENCE_S):
                    return await ask(gateway)
            finally:
                await gateway.aclose()

        return asyncio.run(within())


def settings(stack: GatewayStack, **overrides: Any) -> Settings:
    """With spans and the broker of the stack."""
    wanted = {"open_telemetry.traces": True, **overrides}
    return Settings.load(environ={"PENSTOCK_REDIS_URL": stack.server.url}, overrides=wanted)


def post(*headers: tuple[bytes, bytes]) -> dict[str, Any]:
    """The scope of a request that submits a job."""
    head = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), *headers]
    common = {"type": "http", "http_version": "1.1", "scheme": "http", "query_string": b"", "root_path": ""}
    return {**common, "method": "POST", "path": "/v1/jobs", "headers": head, "client": ("127.0.0.1", 1)}


async def whole_body() -> dict[str, Any]:
    return {"type": "http.request", "body": JOB, "more_body": False}


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_request_that_is_cancelled_has_a_span(stack: GatewayStack, monkeypatch: pytest.MonkeyPatch):
    """A server that stops cancels what still runs. The request is counted, too."""
    program = Program(stack, monkeypatch)

    async def ask(gateway: Gateway) -> str:
        is_reading = asyncio.Event()

        async def receive() -> dict[str, Any]:
            is_reading.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(_: Any) -> None:
            raise AssertionError

        request = asyncio.ensure_future(gateway(post(), receive, send))
        await is_reading.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert gateway._parts is not None
        return str([sample for each in gateway._parts.figures.collector.collect() for sample in each.samples])

    counted = program.run(ask)
    (span,) = program.spans
    assert (span.name, attributes(span)["http.response.status_code"]) == ("POST /v1/jobs", 499)
    assert "'499'" in counted


def test_half_an_answer_is_an_error(stack: GatewayStack, monkeypatch: pytest.MonkeyPatch):
    """Its status was sent before."""
    program = Program(stack, monkeypatch)

    async def ask(gateway: Gateway) -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                raise RuntimeError("secret")

        await gateway(post(), whole_body, send)

    program.run(ask)
    (span,) = program.spans
    assert attributes(span)["http.response.status_code"] == 202
    assert attributes(span)["error.type"] == "RuntimeError"
    assert not span.status.is_ok
    assert "secret" not in span.to_json()


@pytest.mark.parametrize("sampler", [ALWAYS_ON, ALWAYS_OFF], ids=["recorded", "not recorded"])
def test_what_is_no_trace_context_is_refused(stack: GatewayStack, monkeypatch: pytest.MonkeyPatch, sampler: Sampler):
    """Whether a trace is recorded changes no answer."""
    statuses = []

    async def ask(gateway: Gateway) -> None:
        async def send(message: Any) -> None:
            statuses.append(message.get("status"))

        await gateway(post((b"traceparent", b"no context")), whole_body, send)

    Program(stack, monkeypatch, sampler).run(ask)
    assert statuses[0] == 422


def test_a_gateway_in_a_program_leaves_the_provider_to_it(stack: GatewayStack, tmp_path: Path):
    """The program may set its own later: a process has one for good."""
    before = trace.get_tracer_provider()
    wanted = settings(stack, **{"privacy.audit_log_path": str(tmp_path)})
    with ApiServer(port=0, settings=wanted):
        assert trace.get_tracer_provider() is before
