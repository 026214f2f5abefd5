"""The OpenAPI document against the gateway: every route and method, and what each one takes, gives and refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest

from penstock.producers.gateway.application import Gateway
from penstock.producers.gateway.routing import Route
from penstock.registry.settings import Settings
from tests.producers.gateway.conftest import GatewayStack

TYPES = (
    *("application/json", "application/msgpack", "application/octet-stream", "multipart/form-data"),
    *("text/event-stream", "text/plain", "application/xml"),
)
_OF_OPENAI = ("/v1/files/{id}", "/v1/batches/{id}", "/v1/responses/{id}")
"""They need objects of their own; the tests of these routes have them."""
INPUTS: dict[str, Any] = {"inputs": {"x": [[1, 2, 3, 4]]}}


class Operation(NamedTuple):
    """One operation of the document. path: with its words filled in."""

    method: str
    template: str
    path: str
    facts: dict[str, Any]

    def headers(self) -> set[str]:
        """The headers that it declares."""
        return {each["name"] for each in self.facts["parameters"] if each["in"] == "header"}


@pytest.fixture
def document(http: httpx.Client) -> dict[str, Any]:
    """The document of the shared gateway."""
    found: dict[str, Any] = http.get("/openapi.json").json()
    return found


@pytest.fixture
def operations(document: dict[str, Any]) -> list[Operation]:
    """All of its operations, with the words of `double` and of ids that do not exist."""
    return [
        Operation(
            method.upper(),
            path,
            path.replace("{name}", "double").replace("{version}", "1").replace("{id}", "double.0"),
            facts,
        )
        for path, methods in document["paths"].items()
        for method, facts in methods.items()
    ]


@pytest.fixture
def table(stack: GatewayStack, tmp_path: Path) -> list[Route]:
    """The routes of a gateway in this process."""

    async def read() -> list[Route]:
        environ = {"PENSTOCK_REDIS_URL": stack.server.url, "PENSTOCK_HOME": str(tmp_path)}
        gateway = Gateway(Settings.load(environ=environ))
        routes = [*gateway._open().routes.all]
        await gateway.aclose()
        return routes

    return asyncio.run(read())


def test_every_route_and_method_is_described(table: list[Route], operations: list[Operation]):
    """The table and the document name the same, none of them twice, with every word of the path as a parameter."""
    wanted = sorted((route.method, route.path) for route in table)
    assert sorted((each.method, each.template) for each in operations) == wanted
    assert len(wanted) == len(set(wanted)) > 40
    for each in operations:
        words = {name for name, place in _parameters(each) if place == "path"}
        assert words == {word[1:-1] for word in _words(each.template)}, each.template
        assert len(_parameters(each)) == len(set(_parameters(each))), each.template


def test_each_type_of_a_body_that_is_declared_is_taken_and_no_other(http: httpx.Client, operations: list[Operation]):
    """415 for the others, and for no other reason."""
    for each in operations:
        if each.method != "POST":
            continue
        declared = set(each.facts.get("requestBody", {"content": {"application/json": {}}})["content"])
        # A broken body is refused before anything else is looked at, with another status.
        taken = {kind for kind in TYPES if _post(http, each.path, kind).status_code != 415}
        assert taken == declared, each.path


def test_answers_have_a_type_that_is_declared(http: httpx.Client, operations: list[Operation]):
    """Every GET, and each protocol's way to run a model, in every type that it declares."""
    job = http.post("/v1/jobs", json={"model": "double", **INPUTS}, headers={"Prefer": "wait=60"}).json()["id"]
    seen: set[tuple[str, str]] = set()
    by_template = {(each.method, each.template): each for each in operations}

    def check(method: str, template: str, answer: httpx.Response) -> None:
        facts = by_template[method, template].facts["responses"]
        assert str(answer.status_code) in facts, (template, answer.status_code, answer.text)
        kind = answer.headers["content-type"].partition(";")[0]
        assert kind in facts[str(answer.status_code)]["content"], (template, kind)
        seen.add((template, kind))

    for each in operations:
        if each.method == "GET" and not each.template.startswith(_OF_OPENAI):
            check("GET", each.template, http.get(each.path.replace("double.0", job)))
    for kind in TYPES[:3]:
        accept = {"Accept": kind, "Prefer": "wait=60"}
        check("GET", "/v1/jobs/{id}", http.get(f"/v1/jobs/{job}", headers=accept))
        check("POST", "/v1/models/{name}:predict", http.post("/v1/models/double:predict", json=INPUTS, headers=accept))
        check("POST", "/v1/jobs", http.post("/v1/jobs", json={"model": "double", **INPUTS}, headers=accept))
    oip = {"inputs": [{"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 2, 3, 4]}]}
    for more in ({}, {"parameters": {"binary_data_output": True}}):
        check("POST", "/v2/models/{name}/infer", http.post("/v2/models/double/infer", json={**oip, **more}))
    for template in ("/v1/jobs/{id}", "/v1/models/{name}:predict", "/v1/jobs", "/v2/models/{name}/infer"):
        method = "GET" if template == "/v1/jobs/{id}" else "POST"
        declared = by_template[method, template].facts["responses"]["200"]["content"]
        assert {kind for where, kind in seen if where == template} == set(declared), template


def test_refusals_have_the_declared_shape(http: httpx.Client, document: dict[str, Any], operations: list[Operation]):
    """An error of each route, validated by the schema of its `default`."""
    count = 0
    for each in operations:
        if each.method == "GET" and "{" not in each.path and "double" not in each.path:
            continue
        path = each.path.replace("/double", "/nothing")
        answer = http.request(each.method, path, content=b"{" if each.method == "POST" else None)
        if answer.is_success:
            continue
        count += 1
        content = each.facts["responses"]["default"]["content"]
        kind = answer.headers["content-type"]
        assert kind in content, (each.path, answer.text)
        schema = {**content[kind]["schema"], "components": document["components"]}
        jsonschema.validate(answer.json(), schema)
    assert count > 25


def test_headers_are_declared_where_they_are_read(http: httpx.Client, operations: list[Operation]):
    """Prefer waits for a job; Idempotency-Key is declared wherever a request makes something, but at uploads."""
    key, head = "Idempotency-Key", "Inference-Header-Content-Length"
    posts = {each.template: each for each in operations if each.method == "POST"}
    assert {path for path, each in posts.items() if "Prefer" in each.headers()} == {"/v1/jobs"}
    assert {path for path, each in posts.items() if key not in each.headers()} == {
        *("/v1/files", "/v1/models:load", "/v1/models:unload", "/v2/repository/index"),
        *("/v1/batches/{id}/cancel", "/v1/responses/{id}/cancel"),
    }
    for path, each in posts.items():
        takes_bytes = "application/octet-stream" in each.facts.get("requestBody", {"content": {}})["content"]
        assert (head in each.headers()) == takes_bytes, path
    (events,) = (each for each in operations if each.template == "/v1/jobs/{id}/events")
    assert events.headers() == {"Last-Event-ID"}


def test_streams_are_declared(operations: list[Operation]):
    """Server-sent events are an answer of exactly these routes."""
    streaming = {
        each.template
        for each in operations
        for answer in each.facts["responses"].values()
        if "text/event-stream" in answer.get("content", {})
    }
    assert streaming == {
        *("/v1/jobs/{id}/events", "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/responses/{id}"),
    }


def _post(http: httpx.Client, path: str, kind: str) -> httpx.Response:
    return http.post(path, content=b"\xff", headers={"Content-Type": kind})


def _parameters(each: Operation) -> list[tuple[str, str]]:
    return [(parameter["name"], parameter["in"]) for parameter in each.facts["parameters"]]


def _words(template: str) -> Iterator[str]:
    for part in template.replace(":", "/").split("/"):
        if part.startswith("{"):
            yield part
