"""Pages of a browser: those of other origins change nothing, and a name that is bound to the loopback gets 403."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from penstock.registry.api_keys import new_api_key
from penstock.registry.catalog.api_keys import SqlApiKeys
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.test_content_types import post_routes

ELSEWHERE = "https://elsewhere.example"
PREDICT = "/v1/models/double:predict"
DOCUMENT: dict[str, Any] = {"inputs": {"x": [[1, 2, 3, 4]]}}


def predict(http: httpx.Client, **headers: str) -> int:
    """The status of a prediction; 0 for a refusal that says nothing of what was expected."""
    found = http.post(PREDICT, json=DOCUMENT, headers=headers)
    return found.status_code if found.is_success or "Expected" in found.text else 0


def handshake(url: str, **headers: str) -> int:
    """The status of a WebSocket's handshake."""

    async def run() -> int:
        try:
            async with connect(url.replace("http", "ws") + "/predict/stream", additional_headers=headers):
                return 101
        except InvalidStatus as refused:
            return refused.response.status_code

    return asyncio.run(run())


@pytest.mark.parametrize("origin", [ELSEWHERE, "null", "", "http://[", "http://127.0.0.1:1"])
def test_a_page_of_another_origin_changes_nothing(stack: GatewayStack, http: httpx.Client, origin: str):
    """Each POST route, and DELETE, is 403 whatever the type of the body; there is no job. GET is answered."""
    with stack.server.client() as redis:
        before = set(redis.scan_iter("*:job:*"))
        for path in post_routes(http):
            for kind in ("application/json", "text/plain"):
                found = http.post(path, content=b"{}", headers={"Origin": origin, "Content-Type": kind})
                assert found.status_code == 403, (path, found.text)
                assert "Expected one of server.allowed_origins" in found.text
        assert http.delete("/v1/jobs/double.0", headers={"Origin": origin}).status_code == 403
        assert set(redis.scan_iter("*:job:*")) == before
    assert http.get("/v1/models", headers={"Origin": origin}).status_code == 200


def test_a_page_of_the_gateway_itself_is_let_in(stack: GatewayStack, http: httpx.Client):
    """Its origin is the Host of its requests."""
    assert predict(http, Origin=stack.gateway.url) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "10.0.0.1", "[::2]", ""]
)
def test_a_name_bound_to_the_loopback_is_refused(stack: GatewayStack, http: httpx.Client, host: str):
    """DNS rebinding: the page's origin is the gateway's, and its Host is none of this machine, over every protocol."""
    own = {"Host": host, "Origin": f"http://{host}"}
    assert predict(http, **own) == 403
    assert predict(http, Host=host) == 403
    assert http.get("/v1/models", headers={"Host": host}).status_code == 403
    assert handshake(stack.gateway.url, **own) == 403


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:1", "penstock.localhost:9", "127.0.0.1", "127.8.0.1:7", "[::1]:5"]
)
def test_names_of_the_loopback_are_let_in(http: httpx.Client, host: str):
    """With any port, since a tunnel may have another one."""
    assert predict(http, Host=host) == 200
    assert predict(http, Host=host, Origin=f"http://{host}") == 200


def test_settings_let_pages_and_names_in(stack: GatewayStack, start_gateway: StartGateway):
    """server.allowed_origins and server.allowed_hosts: those that they name, and with * all."""
    named = start_gateway(
        PENSTOCK_INFERENCE_SERVER_ALLOWED_ORIGINS=ELSEWHERE, PENSTOCK_INFERENCE_SERVER_ALLOWED_HOSTS="Box.Example"
    )
    every = start_gateway(PENSTOCK_INFERENCE_SERVER_ALLOWED_ORIGINS="*", PENSTOCK_INFERENCE_SERVER_ALLOWED_HOSTS="*")
    for gateway, others in ((named, 403), (every, 200)):
        with gateway.client() as http:
            assert predict(http, Origin=ELSEWHERE) == 200
            assert predict(http, Host="box.example:80") == 200
            assert predict(http, Origin="https://third.example") == others
            assert predict(http, Host="third.example") == others
        assert handshake(gateway.url, Origin=ELSEWHERE) == 101


def test_an_exposed_gateway_checks_the_names_that_it_is_told(start_gateway: StartGateway):
    """Without API keys on any address: other names are let in until server.allowed_hosts says which ones there are."""
    every = ("--host", "0.0.0.0")  # noqa: S104 - the subject of the test
    for names, status in (("", 200), ("models.example", 403)):
        gateway = start_gateway(
            *every, PENSTOCK_INFERENCE_SERVER_API_KEYS="off", PENSTOCK_INFERENCE_SERVER_ALLOWED_HOSTS=names
        )
        url = gateway.url.replace("0.0.0.0", "127.0.0.1")  # noqa: S104 - as above
        with httpx.Client(base_url=url, timeout=180) as http:
            assert predict(http, Host="evil.example") == status
            assert predict(http, Host="models.example") == 200
            assert predict(http) == 200


def test_with_a_key_any_host_is_answered(start_gateway: StartGateway, tmp_path: Path):
    """A page has no key, so a proxy may call the gateway by any name; other origins stay out."""
    url = f"sqlite:///{tmp_path / 'pages.db'}"
    made = new_api_key("behind a proxy", now=0)
    SqlApiKeys(url).add(made.key)
    gateway = start_gateway(PENSTOCK_REGISTRY_URL=url, PENSTOCK_INFERENCE_SERVER_API_KEYS="required")
    with gateway.client() as http:
        assert predict(http, Host="evil.example") == 401
        http.headers["X-API-Key"] = made.text
        assert predict(http, Host="models.example") == 200
        assert predict(http, Origin=ELSEWHERE) == 403
