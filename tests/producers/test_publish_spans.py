"""AR-015: the spans of both clients, by the worker in memory; the program's own provider gets them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from operator import methodcaller
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

from penstock import AsyncClient, Client, InvalidInput, ModelError
from penstock.producers import core
from penstock.producers.publish_spans import AsyncPublishSpans, PublishSpans
from penstock.registry.admission import JobBuilder
from penstock.registry.settings import Settings
from penstock.testing import Model
from penstock.workers import assembly
from tests.servers import ROOT, wait_until

SENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def double(inputs: Any) -> Any:
    return {"y": inputs["x"] * 2}


def _tensor(name: str) -> dict[str, object]:
    return {"name": name, "dtype": "float32", "shape": ["batch", 4]}


def repeating(inputs: Any) -> Any:
    raise ValueError(f"secret {inputs['x'].tolist()}")


def used(inputs: Any) -> Any:
    return {"usage": inputs["x"]}


MODELS = {
    "double": Model(double, inputs=[_tensor("x")], outputs=[_tensor("y")]),
    "repeating": Model(repeating, inputs=[_tensor("x")], outputs=[_tensor("y")]),
    "used": Model(used, inputs=[_tensor("x")], outputs=[_tensor("usage")]),
}
X = np.ones((1, 4), np.float32)


class Program:
    """A program with a provider of its own."""

    def __init__(self, **options: Any) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider(**options)
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = self.provider.get_tracer("program")

    @property
    def spans(self) -> list[ReadableSpan]:
        """Those that have ended, the first that began at first."""
        return sorted(self._exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    def named(self, name: str) -> list[ReadableSpan]:
        """Those with this name, once there is one."""
        wait_until(lambda: any(span.name == name for span in self.spans), 60, f"a span {name}")
        return [span for span in self.spans if span.name == name]


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    return _installed(Program(), monkeypatch)


def _installed(program: Program, monkeypatch: pytest.MonkeyPatch) -> Program:
    """A process has one provider for good: these tests give each its own where Penstock asks for it."""
    tracer: Callable[[], Any] = lambda: program.provider.get_tracer("penstock")  # noqa: E731
    monkeypatch.setattr("penstock.registry.open_telemetry.tracer_of", tracer)
    monkeypatch.setattr(assembly, "tracer_of", tracer)
    return program


def settings(traces: bool = True) -> Settings:
    return Settings.load(environ={}, overrides={"open_telemetry.traces": traces, "cache.enabled": False})


CALLS: dict[str, Callable[[Any], Any]] = {
    "submit": lambda client: client.submit("double", {"x": X}),
    "submit_many": lambda client: client.submit_many("double", [{"x": X}, {"x": X + 1}]),
    "map": lambda client: client.map("double", [X[0], X[0] + 1]),
}


def run(kind: str, call: Callable[[Any], Any], configured: Settings) -> Any:
    """What a call of either client returns, after its jobs have ended."""

    async def awaited() -> Any:
        async with AsyncClient.in_memory(MODELS, settings=configured) as client:
            made = await call(client)
            for handle in made if isinstance(made, list) else [made]:
                if not isinstance(handle, np.ndarray):
                    await handle.result(timeout=180)
            return made

    if kind == "AsyncClient":
        return asyncio.run(awaited())
    with Client.in_memory(MODELS, settings=configured) as client:
        made = call(client)
        for handle in made if isinstance(made, list) else [made]:
            if not isinstance(handle, np.ndarray):
                handle.result(timeout=180)
        return made


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_a_span_whose_jobs_are_its_children(program: Program, kind: str, name: str):
    """It is a child of the program's span. One span for a call, however many jobs it has."""
    with program.tracer.start_as_current_span("request") as request:
        run(kind, CALLS[name], settings())
    (publish,) = program.named("publish double")
    assert publish.kind is trace.SpanKind.PRODUCER
    assert publish.parent is not None
    assert publish.parent.span_id == request.get_span_context().span_id
    jobs = program.named("process double")
    assert len(jobs) == (1 if name == "submit" else 2)
    for job in jobs:
        assert job.parent is not None
        assert publish.context is not None
        assert job.parent.span_id == publish.context.span_id
        assert job.context is not None
        assert job.context.trace_id == request.get_span_context().trace_id


def test_the_span_names_the_job_and_its_queue(program: Program):
    handle = run("Client", lambda client: client.submit("double", {"x": X}, priority="low"), settings())
    (publish,) = program.named("publish double")
    assert dict(publish.attributes or {}) == {
        "messaging.system": "penstock",
        "messaging.operation.type": "send",
        "messaging.operation.name": "publish",
        "messaging.destination.name": "double",
        "messaging.message.id": handle.id,
        "penstock.priority": "low",
    }


def test_a_context_that_the_caller_gives_is_the_parent(program: Program):
    """Also inside of another span of the program."""
    with program.tracer.start_as_current_span("other"):
        run("Client", lambda client: client.submit("double", {"x": X}, traceparent=SENT), settings())
    (publish,) = program.named("publish double")
    assert publish.parent is not None
    assert f"00-{publish.parent.trace_id:032x}-{publish.parent.span_id:016x}-01" == SENT


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_a_refused_job_is_an_error_of_its_span(program: Program, kind: str):
    with pytest.raises(InvalidInput):
        run(kind, lambda client: client.submit("double", {"z": X}), settings())
    (publish,) = program.named("publish double")
    assert (publish.status.is_ok, publish.status.description) == (False, None)
    assert (publish.attributes or {})["error.type"] == "InvalidInput"


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
def test_a_span_never_has_the_text_of_an_error(program: Program, kind: str):
    """The message of a model may repeat what the job asked, and so may that of an iterable of the caller."""

    def rows() -> Iterator[Any]:
        yield X[0]
        raise ValueError("secret row")

    asked: dict[str, Iterable[Any]] = {"repeating": [X[0] * 77], "double": rows()}
    for model, items in asked.items():
        with pytest.raises((ModelError, ValueError), match="secret"):
            run(kind, methodcaller("map", model, items), settings())
        (publish,) = program.named(f"publish {model}")
        assert not publish.status.is_ok
        assert publish.events == ()
        assert "secret" not in publish.to_json()
        assert "77" not in str(publish.attributes)


@pytest.mark.parametrize("kind", ["Client", "AsyncClient"])
@pytest.mark.parametrize("given", ["no context", 5])
def test_what_is_no_trace_context_is_refused_as_without_spans(program: Program, kind: str, given: Any):
    for traces in (False, True):
        with pytest.raises(InvalidInput, match="Bad traceparent"):
            run(kind, lambda client: client.submit("double", {"x": X}, traceparent=given), settings(traces))


def test_a_call_that_is_cancelled_ends_its_span(program: Program):
    """It has submitted nothing that its caller knows of. The span of the task around it is the present one again."""

    async def cancelled() -> None:
        async with AsyncClient.in_memory(MODELS, settings=settings()) as client:
            with program.tracer.start_as_current_span("request") as request:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await client.submit("double", {"x": X})
                task.uncancel()
                assert trace.get_current_span() is request

    asyncio.run(cancelled())
    (publish,) = program.named("publish double")
    assert (publish.attributes or {})["error.type"] == "CancelledError"


def test_an_output_may_be_named_like_one_of_a_text(program: Program):
    """The job ends, its span has no tokens, and the worker goes on."""
    for _ in range(2):
        run("Client", lambda client: client.submit("used", {"x": X}), settings())
    assert [name for span in program.named("process used") for name in span.attributes or {} if "gen_ai" in name] == []


def test_without_the_setting_there_is_no_span(program: Program):
    with program.tracer.start_as_current_span("request"):
        run("Client", CALLS["submit"], settings(traces=False))
    assert [span.name for span in program.spans] == ["request"]


def test_a_trace_that_nobody_records_costs_no_job_its_fast_way(monkeypatch: pytest.MonkeyPatch):
    """The job carries no trace, unless the caller has given one."""
    program = _installed(Program(sampler=ALWAYS_OFF), monkeypatch)
    sent: list[str] = []
    build = JobBuilder.build

    def noted(self: Any, spec: Any, inputs: Any, options: Any = None, **others: Any) -> Any:
        sent.append(options.traceparent)
        return build(self, spec, inputs, options, **others)

    monkeypatch.setattr(JobBuilder, "build", noted)
    run("Client", CALLS["submit"], settings())
    run("Client", lambda client: client.submit("double", {"x": X}, traceparent=SENT), settings())
    assert sent == ["", SENT]
    assert program.spans == []


def test_each_client_has_the_spans_of_its_kind(program: Program):
    """A span of a call that is awaited ends with the call, and not when it is made."""
    for kind, wanted in ((Client, PublishSpans), (AsyncClient, AsyncPublishSpans)):
        assert type(core._publish_spans(settings(), awaits=kind._awaits)) is wanted
    assert core._publish_spans(settings(traces=False), awaits=False) is None


BLOCKED = """
import sys
sys.modules["opentelemetry{module}"] = None
from penstock import Client
try:
    Client("redis://127.0.0.1:1/0")
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_package_that_is_missing_is_named(tmp_path: Path):
    """It is no part of the base install."""
    shown = subprocess.run(
        [sys.executable, "-c", BLOCKED.format(module="")],
        env={"PATH": "", "PYTHONPATH": str(ROOT), "PENSTOCK_INFERENCE_OPEN_TELEMETRY_TRACES": "true"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=180,
    ).stdout
    assert shown == (
        "ConfigurationError opentelemetry-api is not installed. "
        "Expected: pip install '.[otel]' in the checkout of Penstock\n"
    )
