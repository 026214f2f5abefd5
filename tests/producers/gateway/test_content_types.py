"""What a body may be: each POST route refuses another content type, and compression, before it reads the body."""

from __future__ import annotations

import httpx
import pytest

from tests.producers.gateway.conftest import GatewayStack


def post_routes(http: httpx.Client) -> list[str]:
    """The paths of the OpenAPI document that take POST, their words filled in."""
    paths = http.get("/openapi.json").json()["paths"]
    return [
        path.replace("{name}", "double").replace("{version}", "1").replace("{id}", "double.0")
        for path, methods in paths.items()
        if "post" in methods
    ]


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/xml"},
        {"Content-Type": "text/plain;charset=UTF-8"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/jsonp"},
        {"Content-Type": "application/json", "Content-Encoding": "gzip"},
    ],
)
def test_another_type_is_415_on_every_post_route(stack: GatewayStack, http: httpx.Client, headers: dict[str, str]):
    """No route takes a body for JSON that says to be something else; the answer names the type, and there is no job."""
    paths = post_routes(http)
    assert len(paths) > 15
    with stack.server.client() as redis:
        before = set(redis.scan_iter("*:job:*"))
        for path in paths:
            found = http.post(path, content=b'{"inputs": {"x": [[1, 2, 3, 4]]}}', headers=headers)
            assert found.status_code == 415, (path, found.text)
            wanted = "multipart/form-data" if path == "/v1/files" else "application/json"
            if "Content-Encoding" in headers and path != "/v1/files":
                wanted = "without Content-Encoding"
            assert "Expected" in found.text, (path, found.text)
            assert wanted in found.text, (path, found.text)
        assert set(redis.scan_iter("*:job:*")) == before


def test_json_may_have_parameters_or_no_type_at_all(http: httpx.Client):
    """`application/json; charset=utf-8`, upper case and a missing type are JSON."""
    document = b'{"inputs": [1, 2, 3, 4]}'
    for headers in ({}, {"Content-Type": "application/json; charset=utf-8"}, {"Content-Type": "Application/JSON"}):
        found = http.post("/predict?model=double", content=document, headers=headers)
        assert found.status_code == 200, found.text
