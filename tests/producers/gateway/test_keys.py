"""API keys at the gateway: how they are sent, what they allow, whose jobs they see, and what is counted for them."""

from __future__ import annotations

import asyncio
import itertools
import json
import queue
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from websockets.asyncio.client import connect
from websockets.exceptions import InvalidStatus

from penstock.producers.gateway.application import Gateway
from penstock.producers.gateway.rpc.messages import message
from penstock.registry.api_keys import KeyLimits, ShownKey, new_api_key
from penstock.registry.broker.base import Usage
from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.catalog.api_keys import SqlApiKeys
from penstock.registry.queues import meter_key
from penstock.registry.settings import Settings
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.rpc.conftest import INFER, PATIENCE_S, Caller, infer_request
from tests.producers.gateway.test_jobs import ROW, TWICE, job
from tests.producers.gateway.texts import Site
from tests.servers import wait_until

TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32"}


class Keyed(NamedTuple):
    """A gateway that asks for keys, and its registry."""

    gateway: GatewayProcess
    registry_url: str

    @property
    def registry(self) -> SqlApiKeys:
        """Its keys."""
        return SqlApiKeys(self.registry_url)

    def key(self, label: str, **facts: Any) -> ShownKey:
        """A new key, which the gateway knows."""
        made = new_api_key(label, now=int(time.time()), **facts)
        self.registry.add(made.key)
        with self.client(made) as client:
            wait_until(lambda: client.get("/v1/models").status_code != 401, 20, "the gateway knows the key")
        return made

    def client(self, made: ShownKey) -> httpx.Client:
        """A client that sends the key."""
        client = self.gateway.client()
        client.headers["Authorization"] = f"Bearer {made.text}"
        return client


@pytest.fixture(scope="module")
def keyed(stack: GatewayStack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    """A gateway of its own on the shared server."""
    folder = tmp_path_factory.mktemp("keyed")
    url = f"sqlite:///{folder / 'registry.db'}"
    environment = {
        "PENSTOCK_REGISTRY_URL": url,
        "PENSTOCK_INFERENCE_SERVER_API_KEYS": "required",
        "PENSTOCK_INFERENCE_UVICORN_ACCESS_LOG": "true",
        "PENSTOCK_INFERENCE_BATCHES_MAX_OUTSTANDING": "2",
    }
    gateway = GatewayProcess(stack.server, folder, environment=environment)
    try:
        yield Keyed(gateway.start(), url)
    finally:
        gateway.stop()


@pytest.fixture(scope="module")
def acme(keyed: Keyed) -> Iterator[httpx.Client]:
    """A user of the tenant acme."""
    with keyed.client(keyed.key("acme", tenant="acme")) as client:
        yield client


@pytest.fixture(scope="module")
def globex(keyed: Keyed) -> Iterator[httpx.Client]:
    """An administrator of another tenant: the role opens no other tenant's jobs."""
    with keyed.client(keyed.key("globex", tenant="globex", role="admin")) as client:
        yield client


# Who calls


@pytest.mark.parametrize("way", ["bearer", "header", "query"])
def test_a_key_is_sent_in_three_ways(keyed: Keyed, way: str):
    """ES-046: Authorization, X-API-Key, and the parameter api_key, which no log has."""
    text = keyed.key(way).text
    sent: dict[str, Any] = {
        "bearer": {"headers": {"Authorization": f"bearer {text}"}},
        "header": {"headers": {"X-API-Key": text}},
        "query": {"params": {"loaded": "true", "api_key": text}},
    }[way]
    with keyed.gateway.client() as client:
        found = client.get("/v1/models", **sent)
    assert found.status_code == 200, found.text
    assert text not in keyed.gateway.output.read_text()
    if way == "query":
        wait_until(lambda: "/v1/models?loaded=true" in keyed.gateway.output.read_text(), 20, "the log has the request")


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic eDp5"},
        {"X-API-Key": "pk_000000000000_" + "x" * 43},
        {"X-API-Key": "pk_"},
        {"X-API-Key": "\u00fc".encode("latin-1")},
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/embeddings", "/v2", "/metrics"])
def test_without_a_valid_key_every_route_is_401(keyed: Keyed, headers: dict[str, Any], path: str):
    """With the challenge, in the shape of the route's protocol, and before the body is read."""
    with keyed.gateway.client() as client:
        if path == "/v1/embeddings":
            found = client.post(path, headers=headers, content=b"{")
            assert found.json()["error"]["type"] == "authentication_error"
        else:
            found = client.get(path, headers=headers)
            assert "Expected `Authorization: Bearer KEY`" in found.text
    assert found.status_code == 401
    assert found.headers["www-authenticate"] == 'Bearer realm="penstock"'


def test_monitors_and_readers_of_the_document_need_no_key(keyed: Keyed):
    """Probes, and what a person needs to find the header."""
    with keyed.gateway.client() as client:
        for path in ("/health/live", "/health/ready", "/healthz", "/v2/health/ready", "/docs", "/openapi.json"):
            assert client.get(path).status_code == 200, path


def test_a_wrong_secret_of_a_known_key_is_401(keyed: Keyed):
    """The id alone opens nothing."""
    made = keyed.key("half")
    with keyed.gateway.client() as client:
        found = client.get("/v1/models", headers={"X-API-Key": f"pk_{made.key.id}_{'x' * 43}"})
    assert found.status_code == 401


def test_roles_allow_what_their_names_say(keyed: Keyed):
    """readonly looks, user also submits and cancels, admin also sees the figures."""
    expected = {"readonly": (200, 403, 403, 403), "user": (200, 202, 200, 403), "admin": (200, 202, 200, 200)}
    with keyed.client(keyed.key("owner")) as owner:
        job_id = owner.post("/v1/jobs", json=job()).json()["id"]
        owner.get(f"/v1/jobs/{job_id}?wait=60")
    for role, statuses in expected.items():
        with keyed.client(keyed.key(role, role=role)) as client:
            found = (
                client.get(f"/v1/jobs/{job_id}"),
                client.post("/v1/jobs", json=job()),
                client.delete(f"/v1/jobs/{job_id}"),
                client.get("/metrics"),
            )
        assert tuple(each.status_code for each in found) == statuses, role
        refused = [each for each in found if each.status_code == 403]
        assert all(f"the role {role}" in each.json()["detail"] for each in refused)


def test_a_key_of_some_models_sees_no_others(keyed: Keyed):
    """Neither in the list nor by its name, nor through a job; an unknown model is refused in the same words."""
    with keyed.client(keyed.key("narrow", models=("double",))) as client, keyed.client(keyed.key("wide")) as wide:
        assert [each["id"] for each in client.get("/v1/models").json()["data"]] == ["double"]
        assert client.post("/v1/models/double:predict", json={"inputs": {"x": [ROW]}}).status_code == 200
        for model in ("napper", "nothing"):
            for found in (
                client.get(f"/v1/models/{model}"),
                client.post("/v1/jobs", json=job(model)),
                client.post("/v1/jobs:batch", json={"model": model, "inputs": [{"x": [ROW]}]}),
                client.post(f"/v2/models/{model}/infer", json={"inputs": [{**TENSOR, "data": [ROW]}]}),
            ):
                assert found.status_code == 403, found.text
        others = wide.post("/v1/jobs", json=job("napper")).json()["id"]
        assert client.get(f"/v1/jobs/{others}").status_code == 404


def test_a_revoked_key_is_refused(keyed: Keyed):
    """The running gateway notices; how soon: test_key_copy.py."""
    made = keyed.key("short-lived")
    with keyed.client(made) as client:
        assert client.get("/v1/models").status_code == 200
        keyed.registry.revoke(made.key.id, int(time.time()))
        wait_until(lambda: client.get("/v1/models").status_code == 401, 20, "the key is refused")
        assert "unknown, revoked or expired" in client.get("/v1/models").json()["detail"]


def test_a_rotated_key_has_a_new_secret(keyed: Keyed):
    """The old text stops, the new one has the same id."""
    made = keyed.key("rotated")
    again = keyed.registry.replace_secret(made.key.id, time.time())
    with keyed.client(made) as old, keyed.client(again) as new:
        wait_until(lambda: new.get("/v1/models").status_code == 200, 20, "the new secret works")
        assert old.get("/v1/models").status_code == 401
    assert again.key.id == made.key.id


@pytest.mark.parametrize(("host", "status"), [("127.0.0.1", 200), ("[::1]", 200), ("192.0.2.1", 401), ("gateway", 200)])
def test_connections_from_a_network_need_a_key(stack: GatewayStack, tmp_path: Path, host: str, status: int):
    """Also under servers that listen where no setting of ours says."""
    environ = {"PENSTOCK_REDIS_URL": stack.server.url, "PENSTOCK_HOME": str(tmp_path)}

    async def ask() -> int:
        gateway = Gateway(Settings.load(environ=environ))
        transport = httpx.ASGITransport(app=gateway)
        async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}:8000") as client:
            found = await client.get("/v1/models")
        await gateway.aclose()
        return found.status_code

    assert asyncio.run(ask()) == status


def test_a_gateway_asks_for_keys_once_there_is_one(start_gateway: StartGateway, tmp_path: Path):
    """On the loopback, `penstock serve` needs no key and makes no database; from the first key on it asks."""
    url = f"sqlite:///{tmp_path / 'later.db'}"
    gateway, registry = start_gateway(PENSTOCK_REGISTRY_URL=url), SqlApiKeys(url)
    with gateway.client() as client:
        assert client.post("/v1/models/double:predict", json={"inputs": {"x": [ROW]}}).status_code == 200
        assert not (tmp_path / "later.db").exists()
        first, second = (new_api_key(label, now=0) for label in ("first", "second"))
        registry.add(first.key)
        wait_until(lambda: client.get("/v1/models").status_code == 401, 20, "the gateway asks for a key")
        # Without any valid key it does not open again. The second key shows that it has read the change before.
        registry.revoke(first.key.id, 1)
        registry.add(second.key)
        headers = {"X-API-Key": second.text}
        wait_until(lambda: client.get("/v1/models", headers=headers).status_code == 200, 20, "the second key works")
        registry.revoke(second.key.id, 1)
        wait_until(lambda: client.get("/v1/models", headers=headers).status_code == 401, 20, "both keys are revoked")
        assert client.get("/v1/models").status_code == 401


@pytest.mark.parametrize(("access", "status"), [("auto", 401), ("off", 200)])
def test_a_gateway_for_other_machines_needs_keys(start_gateway: StartGateway, tmp_path: Path, access: str, status: int):
    """--host 0.0.0.0: no request is let in without a key, though none exists yet, unless keys are off."""
    gateway = start_gateway(
        *("--host", "0.0.0.0"),  # noqa: S104 - the subject of the test
        PENSTOCK_REGISTRY_URL=f"sqlite:///{tmp_path / 'none.db'}",
        PENSTOCK_INFERENCE_SERVER_API_KEYS=access,
    )
    assert gateway.url.startswith("http://0.0.0.0:")
    with httpx.Client(base_url=gateway.url.replace("0.0.0.0", "127.0.0.1")) as client:  # noqa: S104 - as above
        assert client.get("/health/live").status_code == 200
        assert client.get("/v1/models").status_code == status
        assert client.post("/v1/models/double:predict", json={"inputs": {"x": [ROW]}}).status_code == status
    caller = Caller(gateway.rpc.replace("0.0.0.0", "127.0.0.1"))  # noqa: S104 - as above
    refused = caller.refused(INFER, infer_request())
    caller.channel.close()
    assert (refused.code() if refused else None) == (grpc.StatusCode.UNAUTHENTICATED if status == 401 else None)


# Whose jobs


def _calls(document: dict[str, Any], owned: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, str, str]]:
    """(method, path, id) of every route of the application, with the words filled in; the id is empty without one.

    owned: the ids of another tenant by the path in front of them.
    """
    for path, operations in document["paths"].items():
        path = path.replace("{name}", "double").replace("{version}", "1")
        stem = path.partition("/{id}")[0]
        ids = owned[stem] if "{id}" in path else [""]
        for method, named in itertools.product(operations, ids):
            filled = path.replace("{id}", named)
            assert "{" not in filled, f"Expected a value for every word of {path}"
            yield method.upper(), filled, named


def _batch_of_naps(client: httpx.Client, count: int) -> tuple[str, str]:
    """(the id of a file of so many lines, that of a batch which runs it)."""
    lines = [
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/models/napper:predict",
                "body": {"inputs": {"x": [[number, 8, 7, 6]]}},
            }
        )
        for number in range(count)
    ]
    file = client.post("/v1/files", files={"file": ("l.jsonl", "\n".join(lines))}, data={"purpose": "batch"}).json()
    fields = {"input_file_id": file["id"], "endpoint": "/v1/models/napper:predict", "completion_window": "1h"}
    return file["id"], client.post("/v1/batches", json=fields).json()["id"]


def _ended_batch(client: httpx.Client, batch_id: str) -> dict[str, Any]:
    """The batch, once it has completed."""

    def found() -> Any:
        batch = client.get(f"/v1/batches/{batch_id}").json()
        return batch if batch["status"] == "completed" else None

    batch: dict[str, Any] = wait_until(found, 60, "the batch has completed")
    return batch


def test_no_route_crosses_to_another_tenant(acme: httpx.Client, globex: httpx.Client, site: Site):
    """0 crossings: each route that names a job, a file, a batch or a response of another tenant answers 404, whether it
    has ended or runs, and changes nothing; no answer of any other route has an id of them."""
    ended = acme.post("/v1/jobs", json=job()).json()["id"]
    acme.get(f"/v1/jobs/{ended}?wait=60")
    first_input, first_batch = _batch_of_naps(acme, 1)
    output = _ended_batch(acme, first_batch)["output_file_id"]
    wish = {"model": "writer", "input": "abc", "background": True, "max_output_tokens": 8, "ignore_eos": True}
    responses = [acme.post("/v1/responses", json=wish).json()["id"] for _ in range(2)]
    acme.get(f"/v1/jobs/{responses[0].removeprefix('resp_')}?wait=60")
    held = [acme.post("/v1/jobs", json=job("napper", [n, 1, 0, 0])).json()["id"] for n in range(3)]
    second_input, second_batch = _batch_of_naps(acme, 4)
    owned = {
        "/v1/jobs": [ended, held[-1], *(name.removeprefix("resp_") for name in responses)],
        "/v1/files": [first_input, output, second_input],
        "/v1/batches": [first_batch, second_batch],
        "/v1/responses": responses,
    }
    every = {name for names in owned.values() for name in names} | {*held}
    document = globex.get("/openapi.json").json()
    seen: Counter[str] = Counter()
    for method, path, named in _calls(document, owned):
        found = globex.request(method, path, json={} if method == "POST" else None)
        if named:
            seen[path.replace(named, "{id}")] += 1
            assert found.status_code == 404, f"{method} {path}: {found.status_code} {found.text}"
            assert "Penstock-Job-Id" not in found.headers
        else:
            assert not [each for each in every if each in found.text or each in str(found.headers)], path
    assert seen == {
        "/v1/jobs/{id}": 8,
        "/v1/jobs/{id}/events": 4,
        "/v1/files/{id}": 6,
        "/v1/files/{id}/content": 3,
        "/v1/batches/{id}": 2,
        "/v1/batches/{id}/cancel": 2,
        "/v1/responses/{id}": 4,
        "/v1/responses/{id}/cancel": 2,
    }
    for named, query in (("/v1/files", first_input), ("/v1/batches", first_batch)):
        assert globex.get(named, params={"after": query}).status_code == 404
    fields = {"input_file_id": first_input, "endpoint": "/v1/models/double:predict", "completion_window": "1h"}
    assert globex.post("/v1/batches", json=fields).status_code == 404
    assert globex.get(f"/v1/responses/{responses[0]}", params={"stream": "true"}).status_code == 404
    for job_id in (ended, *held):
        assert acme.get(f"/v1/jobs/{job_id}?wait=60").json()["status"] == "completed"
    assert _ended_batch(acme, second_batch)["request_counts"] == {"total": 4, "completed": 4, "failed": 0}
    for file in owned["/v1/files"]:
        assert acme.get(f"/v1/files/{file}/content").status_code == 200
    for name in responses:
        acme.get(f"/v1/jobs/{name.removeprefix('resp_')}?wait=60")
        assert acme.get(f"/v1/responses/{name}").json()["usage"]["output_tokens"] == 8


def test_tenants_share_no_idempotency_keys(acme: httpx.Client, globex: httpx.Client):
    """The same key and inputs are one job for one tenant, and another job for another one."""
    headers = {"Idempotency-Key": '"tenants"'}
    first, again, other = (
        client.post("/v1/jobs", json=job(), headers=headers).json()["id"] for client in (acme, acme, globex)
    )
    assert first == again != other
    assert globex.get(f"/v1/jobs/{other}?wait=60").json()["outputs"]["y"]["data"] == [TWICE]


def test_a_job_belongs_to_the_tenant_of_its_key(keyed: Keyed):
    """Another key of the tenant sees it, in every route that shows a job."""
    with keyed.client(keyed.key("a", tenant="shared")) as one, keyed.client(keyed.key("b", tenant="shared")) as two:
        job_id = one.post("/v1/jobs", json=job()).json()["id"]
        assert two.get(f"/v1/jobs/{job_id}?wait=60").json()["outputs"]["y"]["data"] == [TWICE]
        assert "completed" in two.get(f"/v1/jobs/{job_id}/events").text


def test_refused_requests_leave_no_trace_of_a_job(stack: GatewayStack, keyed: Keyed):
    """401, 403 and 429, on every route that submits, by HTTP, gRPC and WebSocket: no key of a job in Redis."""
    limited = keyed.key("spent", limits=KeyLimits(requests_per_day=1))
    reader = keyed.key("looks", role="readonly")
    texts = {"model": "double", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    infer = {"inputs": [{**TENSOR, "data": ROW}]}
    documents: dict[str, Any] = {
        "/v1/jobs": job(idempotency_key="x") | {"inputs": {"x": [ROW]}},
        "/v1/jobs:batch": {"model": "double", "inputs": [{"x": [ROW]}], "idempotency_keys": ["refused"]},
        "/v1/models/double:predict": {"inputs": {"x": [ROW]}},
        "/predict?model=double": {"inputs": ROW},
        "/predict/batch?model=double": {"batch": [ROW]},
        "/v2/models/double/infer": infer,
        "/v1/embeddings": {"model": "double", "input": [[1, 2, 3, 4]]},
        **dict.fromkeys(("/v1/completions", "/v1/chat/completions", "/v1/responses"), texts),
    }

    def keys() -> set[bytes]:
        with closing(stack.server.client()) as redis:
            return set(redis.scan_iter("{double}:*", count=10_000))

    async def shake(text: str) -> int:
        address = f"{keyed.gateway.url.replace('http', 'ws')}/predict/stream"
        with pytest.raises(InvalidStatus) as refused:
            await connect(address, additional_headers={"X-API-Key": text})
        return refused.value.response.status_code

    before, caller = keys(), Caller(keyed.gateway.rpc)
    for status, text in ((401, "pk_nobody"), (403, reader.text), (429, limited.text)):
        with keyed.gateway.client() as client:
            client.headers.update({"X-API-Key": text, "Idempotency-Key": "refused"})
            for path, document in documents.items():
                found = client.post(path, json=document)
                assert found.status_code == status, (path, found.text)
                assert "penstock-job-id" not in found.headers
        assert caller.refused(INFER, infer_request(), metadata=[("x-api-key", text)]) is not None
        assert asyncio.run(shake(text)) == status
    caller.channel.close()
    # What earlier tests have left may expire meanwhile.
    assert not keys() - before


# What is counted


def test_usage_counts_each_job_once(stack: GatewayStack, keyed: Keyed):
    """One job, a repeated request for it, and three of a batch: four jobs; refused requests and looks cost nothing."""
    made = keyed.key("counted", tenant="counted")
    with keyed.client(made) as client:
        headers = {"Idempotency-Key": '"once"'}
        assert {client.post("/v1/jobs", json=job(), headers=headers).status_code for _ in range(3)} == {202}
        assert client.post("/v1/jobs:batch", json={"model": "double", "inputs": [{"x": [ROW]}] * 3}).status_code == 202
        assert client.post("/v1/jobs", json=job(row=[1.0])).status_code == 422
        client.get("/v1/models")
    assert used(stack, made, "double").jobs == 4


@pytest.mark.parametrize("limit", [20, pytest.param(1000, marks=pytest.mark.slow)])
def test_a_minute_is_exact_over_two_gateways(
    stack: GatewayStack, keyed: Keyed, start_gateway: StartGateway, limit: int
):
    """CX-018: of three times the limit as many are admitted as the limit says; the others are 429 with Retry-After."""
    made = keyed.key("limited", limits=KeyLimits(requests_per_minute=limit))
    second = start_gateway(
        PENSTOCK_REGISTRY_URL=keyed.registry_url,
        PENSTOCK_INFERENCE_SERVER_API_KEYS="required",
    )
    with closing(stack.server.client()) as redis:
        redis.delete(meter_key(f"key:{made.key.id}", "minute"))
    answers = asyncio.run(_overload([keyed.gateway.url, second.url], made.text, 3 * limit))
    admitted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert (len(admitted), len(refused)) == (limit, 2 * limit)
    assert {answer.headers["ratelimit-policy"] for answer in answers} == {f'"requests";q={limit};w=60'}
    assert sorted(_left(answer) for answer in admitted) == [*range(limit)]
    assert {_left(answer) for answer in refused} == {0}
    assert all(1 <= int(answer.headers["retry-after"]) <= 61 for answer in refused)
    assert f"{limit} per minute (requests)" in refused[0].text


async def _overload(urls: list[str], key: str, count: int) -> list[httpx.Response]:
    """So many requests over all gateways, 32 at a time."""
    places = asyncio.Semaphore(32)
    async with httpx.AsyncClient(headers={"X-API-Key": key}, timeout=180) as client:

        async def ask(number: int) -> httpx.Response:
            async with places:
                return await client.get(f"{urls[number % len(urls)]}/v2")

        return await asyncio.gather(*(ask(number) for number in range(count)))


@pytest.fixture(scope="module")
def pair(stack: GatewayStack, keyed: Keyed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Keyed]]:
    """Two gateways with limits of each kind; each case of the test below meets one of them first."""
    environment = {
        "PENSTOCK_REGISTRY_URL": keyed.registry_url,
        "PENSTOCK_INFERENCE_SERVER_API_KEYS": "required",
        "PENSTOCK_INFERENCE_SERVER_ADDRESS_HEADER": "x-real-ip",
        "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ENABLED": "true",
        "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_TENANT_REQUESTS_PER_MINUTE": str(OF_TENANT),
        "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ADDRESS_REQUESTS_PER_MINUTE": str(OF_ADDRESS),
        "PENSTOCK_INFERENCE_SAFEGUARDS_RATE_LIMIT_ROUTES": json.dumps([f"/v1/models={OF_ROUTE}"]),
    }
    gateways = [
        GatewayProcess(stack.server, tmp_path_factory.mktemp("pair"), environment=environment) for _ in range(2)
    ]
    try:
        yield [Keyed(gateway.start(), keyed.registry_url) for gateway in gateways]
    finally:
        for gateway in gateways:
            gateway.stop()


OF_KEY, OF_ROUTE, OF_TENANT, OF_ADDRESS = 20, 25, 70, 90
EMBEDDING = {"model": "double", "input": [[1, 2, 3, 4]]}


class Overload(NamedTuple):
    """A limit that two gateways share. keys: how many ask."""

    name: str
    expected: int
    limits: KeyLimits = KeyLimits()
    keys: int = 1
    is_one_tenant: bool = True
    is_one_address: bool = False
    path: str = "/v2"


OVERLOADS = [
    Overload("day", OF_KEY, KeyLimits(requests_per_day=OF_KEY)),
    # Four of each embedding.
    Overload("tokens", OF_KEY, KeyLimits(tokens_per_minute=4 * OF_KEY), path="/v1/embeddings"),
    Overload("tenant", OF_TENANT, keys=2),
    Overload("address", OF_ADDRESS, keys=2, is_one_tenant=False, is_one_address=True),
    Overload("route", OF_ROUTE, path="/v1/models"),
]


@pytest.mark.parametrize("case", OVERLOADS, ids=lambda case: case.name)
def test_every_limit_is_exact_over_two_gateways(stack: GatewayStack, pair: list[Keyed], case: Overload):
    """CX-018: of three times a limit, asked of both at once, as many are admitted as it says; the others name it."""
    tenants = [f"over-{case.name}-{0 if case.is_one_tenant else number}" for number in range(case.keys)]
    made = [pair[0].key(f"{case.name} {tenant}", tenant=tenant, limits=case.limits) for tenant in tenants]
    for each in made:
        with pair[1].client(each) as client:
            wait_until(partial(_is_known, client), 20, "the other one knows the key")
    with closing(stack.server.client()) as redis:
        for subject in (*tenants, *(each.key.id for each in made)):
            for meter in redis.scan_iter(f"{{gateway}}:limits:*{subject}*", count=10_000):
                redis.delete(meter)
    count = 3 * case.expected
    answers = asyncio.run(_ask_pair([each.gateway.url for each in pair], [each.text for each in made], case, count))
    admitted = [answer for answer in answers if answer.status_code == 200]
    refused = [answer for answer in answers if answer.status_code == 429]
    assert (len(admitted), len(refused)) == (case.expected, count - case.expected)
    for answer in refused:
        assert f"({case.name}) is spent" in answer.text
        assert int(answer.headers["retry-after"]) >= 1


def test_a_quota_is_exact_for_batches_of_jobs(stack: GatewayStack, pair: list[Keyed]):
    """CX-018: of many batches at once, as many are admitted as the quota has room for. Those that
    are refused hold no part of it."""
    made = pair[0].key("batches of jobs", limits=KeyLimits(requests_per_day=20))
    with pair[1].client(made) as client, closing(stack.server.client()) as redis:
        wait_until(partial(_is_known, client), 20, "the other one knows the key")
        redis.delete(day := meter_key(f"key:{made.key.id}", "day"))

        async def ask_all() -> Counter[int]:
            headers = {"X-API-Key": made.text}
            body = {"model": "double", "inputs": [{"x": [ROW]}] * 3}
            async with httpx.AsyncClient(headers=headers, timeout=120) as caller:
                calls = [caller.post(f"{pair[n % 2].gateway.url}/v1/jobs:batch", json=body) for n in range(40)]
                return Counter([each.status_code for each in await asyncio.gather(*calls)])

        assert asyncio.run(ask_all()) == {202: 6, 429: 34}
        assert redis.hget(day, "sum") == b"18"


def _is_known(client: httpx.Client) -> bool:
    return client.get("/v2").status_code != 401


async def _ask_pair(urls: list[str], keys: list[str], case: Overload, count: int) -> list[httpx.Response]:
    """So many requests, in turn of each gateway with each key, 32 at a time."""
    places = asyncio.Semaphore(32)
    turns = list(itertools.product(keys, urls))
    async with httpx.AsyncClient(timeout=120) as client:

        async def ask(number: int) -> httpx.Response:
            key, url = turns[number % len(turns)]
            address = "192.0.2.1" if case.is_one_address else f"198.51.100.{number}"
            headers = {"X-API-Key": key, "X-Real-IP": address}
            async with places:
                if case.name == "tokens":
                    return await client.post(f"{url}{case.path}", json=EMBEDDING, headers=headers)
                return await client.get(f"{url}{case.path}", headers=headers)

        return await asyncio.gather(*(ask(number) for number in range(count)))


def _left(answer: httpx.Response) -> int:
    """What the header says is left."""
    return int(answer.headers["ratelimit"].partition("r=")[2].partition(";")[0])


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (KeyLimits(requests_per_day=2), "day"),
        (KeyLimits(requests_per_month=2), "month"),
    ],
)
def test_a_quota_ends(keyed: Keyed, limits: KeyLimits, name: str):
    """A further request is refused until the day or the month of UTC ends. `key` has used the first one."""
    with keyed.client(keyed.key(name, limits=limits)) as client:
        assert client.get("/v1/models").status_code == 200
        refused = client.post("/v1/embeddings", json={})
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert int(refused.headers["retry-after"]) <= 31 * 86_400


def test_a_batch_costs_as_many_requests_as_it_has_jobs(keyed: Keyed):
    """Many jobs in one request are no way around a limit; a refused batch submits nothing."""
    with keyed.client(keyed.key("batch", limits=KeyLimits(requests_per_minute=6))) as client:
        batch = {"model": "double", "inputs": [{"x": [ROW]}] * 4}
        accepted = client.post("/v1/jobs:batch", json=batch)
        assert accepted.status_code == 202
        # `key` has used one.
        assert _left(accepted) == 1
        assert client.post("/v1/jobs:batch", json={**batch, "inputs": batch["inputs"][:2]}).status_code == 429


def test_a_refused_request_is_charged_nowhere(stack: GatewayStack, keyed: Keyed):
    """429 for a while, 422 for ever: neither the minute nor the day has the charge of its entry."""
    made = keyed.key("refused", limits=KeyLimits(requests_per_minute=10, requests_per_day=20, tokens_per_minute=50))
    minute, day = (meter_key(f"key:{made.key.id}", name) for name in ("minute", "day"))

    def batch_of(count: int) -> dict[str, Any]:
        return {"model": "double", "inputs": [{"x": [ROW]}] * count}

    with keyed.client(made) as client, closing(stack.server.client()) as redis:
        redis.delete(minute, day)
        for _ in range(12):
            beyond = client.post("/v1/jobs:batch", json=batch_of(50))
            assert beyond.status_code == 422, beyond.text
            assert "counts as 50 requests. Expected at most 10" in beyond.json()["detail"]
            assert "retry-after" not in beyond.headers
            assert _left(beyond) == 10
        tokens = client.post("/v1/embeddings", json={"model": "double", "input": [[1, 2, 3, 4]] * 13})
        assert tokens.status_code == 422, tokens.text
        assert "counts as 52 tokens. Expected at most 50" in tokens.json()["error"]["message"]
        assert redis.hget(day, "sum") == b"0"
        assert client.post("/v1/jobs:batch", json=batch_of(6)).status_code == 202
        for _ in range(5):
            refused = client.post("/v1/jobs:batch", json=batch_of(5))
            assert refused.status_code == 429, refused.text
            assert (_left(refused), int(refused.headers["retry-after"]) >= 1) == (4, True)
        assert client.post("/v1/jobs:batch", json=batch_of(4)).status_code == 202
        assert int(redis.hget(day, "sum") or 0) == 10


def test_refused_texts_are_charged_nowhere(stack: GatewayStack, keyed: Keyed, site: Site):
    """More texts than the limit says, in one request, and then as many as it says."""
    made = keyed.key("refused texts", limits=KeyLimits(requests_per_minute=3))
    request = {"model": "writer", "prompt": "abc", "max_tokens": 1, "ignore_eos": True}
    with keyed.client(made) as client, closing(stack.server.client()) as redis:
        redis.delete(meter_key(f"key:{made.key.id}", "minute"))
        for _ in range(4):
            refused = client.post("/v1/completions", json={**request, "n": 4})
            assert refused.status_code == 422, refused.text
            assert "counts as 4 requests. Expected at most 3" in refused.json()["error"]["message"]
        assert client.post("/v1/completions", json={**request, "n": 3}).status_code == 200
        assert client.post("/v1/completions", json={**request, "n": 1}).status_code == 429


def test_lines_of_a_batch_wait_for_the_limits_of_their_key(stack: GatewayStack, keyed: Keyed):
    """They take half of a minute, and wait for the next one: no line fails. Each counts for the quota, too."""
    made = keyed.key("lines", limits=KeyLimits(requests_per_minute=12, requests_per_day=1000))
    minute, day = (meter_key(f"key:{made.key.id}", name) for name in ("minute", "day"))
    lines = [
        json.dumps({"custom_id": f"{n}", "method": "POST", "url": "/v1/models/double:predict", "body": body})
        for n, body in enumerate([{"inputs": {"x": [ROW]}}] * 9)
    ]
    with keyed.client(made) as client, closing(stack.server.client()) as redis:
        file = client.post("/v1/files", files={"file": ("l.jsonl", "\n".join(lines))}, data={"purpose": "batch"}).json()
        fields = {"input_file_id": file["id"], "endpoint": "/v1/models/double:predict", "completion_window": "1h"}
        redis.delete(minute, day)
        batch_id = client.post("/v1/batches", json=fields).json()["id"]
        # Five lines and the request above. What is left of the minute is for requests.
        wait_until(lambda: int(redis.hget(minute, "sum") or 0) >= 6, 60, "lines were charged")
        asked = 0

        def ended() -> Any:
            nonlocal asked
            redis.delete(minute)
            asked += 1
            batch = client.get(f"/v1/batches/{batch_id}").json()
            return batch if batch["status"] == "completed" else None

        batch = wait_until(ended, 60, "the batch has ended")
        assert int(redis.hget(day, "sum") or 0) == 1 + asked + 9
    assert batch["request_counts"] == {"total": 9, "completed": 9, "failed": 0}


def test_tokens_have_a_limit_of_their_own(keyed: Keyed):
    """Lists of tokens cost as many as they have; a request that exceeds what is left submits nothing."""
    with keyed.client(keyed.key("tokens", limits=KeyLimits(tokens_per_minute=10))) as client:
        request = {"model": "double", "input": [[1, 2, 3, 4], [5, 6, 7, 8]]}
        accepted = client.post("/v1/embeddings", json=request)
        assert accepted.status_code == 200, accepted.text
        assert accepted.headers["ratelimit"].startswith('"tokens";r=2;')
        refused = client.post("/v1/embeddings", json=request)
    assert refused.status_code == 429
    assert "10 per minute (tokens)" in refused.json()["error"]["message"]


def used(stack: GatewayStack, made: ShownKey, model: str) -> Usage:
    """What a key has used of a model."""
    with closing(RedisStreams.from_url(stack.server.url)) as broker:
        (found,) = [usage for (account, _), usage in broker.usage(model).items() if account == made.key.id]
    return found


def test_tokens_of_embeddings_are_in_the_usage(stack: GatewayStack, keyed: Keyed):
    """Once for each job: a request that gets an earlier job by its key adds none. The page of metrics has them, too."""
    made = keyed.key("embeds")
    request = {"model": "double", "input": [[1, 2, 3, 4], [5, 6, 7, 8]]}
    with keyed.client(made) as client:
        for headers in ({}, {"Idempotency-Key": "e"}, {"Idempotency-Key": "e"}):
            answered = client.post("/v1/embeddings", json=request, headers=headers)
            assert answered.json()["usage"] == {"prompt_tokens": 8, "total_tokens": 8}
        assert client.post("/v1/embeddings", json={**request, "input": [[1, 2, 3]]}).status_code == 422
    assert used(stack, made, "double") == Usage(2, 16, 0)
    with keyed.client(keyed.key("reads metrics", role="admin")) as client:
        families = {each.name: each.samples for each in text_string_to_metric_families(client.get("/metrics").text)}
    shown = {
        each.labels["kind"]: each.value
        for each in families["penstock_api_key_tokens"]
        if each.labels["key"] == made.key.id
    }
    assert shown == {"prompt": 16, "generated": 0}


def test_a_killed_worker_counts_the_tokens_of_embeddings_once(stack: GatewayStack, keyed: Keyed):
    """kill -9 while lines of a batch run: their jobs run again, and count once."""
    count = 8
    made = keyed.key("embeds much")
    entry = {"method": "POST", "url": "/v1/embeddings"}
    lines = [
        json.dumps({"custom_id": f"{n}", **entry, "body": {"model": "napper", "input": [[n, 1, 2, 3]]}})
        for n in range(count)
    ]
    with keyed.client(made) as client:
        batch_id = create_batch(client, entry["url"], lines)

        def done() -> int:
            completed: int = client.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"]
            return completed

        wait_until(lambda: done() > 0, 60, "a line has ended")
        stack.worker.kill()
        assert done() < count
        stack.worker.start()
        wait_until(lambda: done() == count, 60, "all lines have ended")
    assert used(stack, made, "napper") == Usage(count, 4 * count, 0)


def create_batch(client: httpx.Client, url: str, lines: Sequence[str]) -> str:
    """The id of a new batch of these lines."""
    form: dict[str, Any] = {"purpose": (None, "batch"), "file": ("lines.jsonl", "\n".join(lines).encode())}
    file_id = client.post("/v1/files", files=form).json()["id"]
    wish = {"input_file_id": file_id, "endpoint": url, "completion_window": "24h"}
    return str(client.post("/v1/batches", json=wish).json()["id"])


def test_tokens_of_a_text_count_when_it_is_whole(stack: GatewayStack, keyed: Keyed, site: Site):
    """Those of the prompt and of the text, in the limit and in the usage; the texts of one request are jobs of their
    own. A key whose tokens are spent is refused before it submits anything."""
    made = keyed.key("writer", limits=KeyLimits(tokens_per_minute=60))
    request = {"model": "writer", "prompt": "abc", "max_tokens": 20, "ignore_eos": True, "temperature": 0, "n": 2}
    with keyed.client(made) as client:
        answered = client.post("/v1/completions", json=request)
        assert answered.status_code == 200, answered.text
        # Each choice has read the prompt.
        spent = 2 * answered.json()["usage"]["prompt_tokens"] + 40
        wait_until(lambda: _token_limit(client) == 60 - spent, 20, "the tokens of both are charged")
        job = {"model": "writer", "inputs": {"prompt": ["abc"]}, "outputs": ["text"]}
        with closing(stack.server.client()) as redis:
            redis.delete(meter_key(f"key:{made.key.id}", "tokens"))
        assert client.post("/v1/jobs", json=job, headers={"Prefer": "wait=60"}).json()["status"] == "completed"
        with closing(stack.server.client()) as redis:
            meter = meter_key(f"key:{made.key.id}", "tokens")
            wait_until(lambda: redis.hexists(meter, "first"), 20, "the tokens are charged")
            redis.hset(meter, "sum", 60)
        assert client.post("/v1/completions", json=request).status_code == 429
    found = used(stack, made, "writer")
    assert (found.jobs, found.prompt_tokens) == (3, 3 * (spent - 40) // 2)
    assert found.generated_tokens > 40


def test_a_killed_worker_costs_nothing_twice(stack: GatewayStack, keyed: Keyed, site: Site):
    """kill -9 while texts are written: each job, and each token of its one result, is counted once for its key."""
    count, each = 24, 40
    made = keyed.key("killed", limits=KeyLimits(tokens_per_minute=1_000_000))
    prompt_tokens = len(site.tokens("abc"))
    params = json.dumps({"max_tokens": each, "ignore_eos": True, "temperature": 0})
    document = {"model": "writer", "inputs": [{"prompt": ["abc"], "sampling_params": [params]}] * count}
    with keyed.client(made) as client, closing(stack.server.client()) as redis:
        ids = [one["id"] for one in client.post("/v1/jobs:batch", json=document).json()["jobs"]]

        def statuses() -> Counter[str]:
            return Counter(client.get(f"/v1/jobs/{job_id}").json()["status"] for job_id in ids)

        wait_until(lambda: statuses()["completed"], 60, "one text is written")
        site.worker.kill()
        assert statuses()["completed"] < count
        site.worker.start()
        wait_until(lambda: statuses()["completed"] == count, 60, "all are written")
        spent = int(redis.hget(meter_key(f"key:{made.key.id}", "tokens"), "sum") or 0)
    assert used(stack, made, "writer") == Usage(count, count * prompt_tokens, count * each)
    # The limit of a minute is charged behind the commit, and may miss the texts at the moment of the kill.
    assert 0 < spent <= count * (prompt_tokens + each)


def _token_limit(client: httpx.Client) -> int:
    """What is left of the tokens of the minute."""
    return _left(client.get("/v2"))


# The other protocols enter by the same door


def test_keys_over_grpc(keyed: Keyed, acme: httpx.Client, globex: httpx.Client):
    """Metadata has the key. The job is one of its tenant; methods of monitors need no key."""
    reader, caller = keyed.key("reader over gRPC", role="readonly"), Caller(keyed.gateway.rpc)
    authorization = ("authorization", acme.headers["Authorization"])
    assert caller.refusal(INFER, infer_request()).code() == grpc.StatusCode.UNAUTHENTICATED
    denied = caller.refusal(INFER, infer_request(), metadata=[("x-api-key", reader.text)])
    assert denied.code() == grpc.StatusCode.PERMISSION_DENIED
    _, trailing = caller.call(INFER, infer_request(), metadata=[authorization])
    job_id = trailing["penstock-job-id"]
    assert [client.get(f"/v1/jobs/{job_id}").status_code for client in (acme, globex)] == [200, 404]
    live = caller.channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
    assert live(b"", 60) is not None
    caller.channel.close()


def test_a_refused_request_of_a_stream_is_answered_and_the_stream_goes_on(stack: GatewayStack, keyed: Keyed):
    """Beyond a limit, and for bytes that are no request, as Triton does. A revoked key ends the stream."""
    made, caller = keyed.key("stream", limits=KeyLimits(requests_per_minute=4)), Caller(keyed.gateway.rpc)
    sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    stream = caller.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
    answers = stream(iter(sent.get, None), PATIENCE_S, metadata=[("x-api-key", made.text)])
    kind = message("ModelStreamInferResponse")

    def ask(data: bytes) -> Any:
        sent.put(data)
        return kind.FromString(next(answers))

    good = infer_request(id="good").SerializeToString()
    # `key` and the call have used one each.
    assert ask(good).infer_response.id == "good"
    assert "no message" in ask(b"\xff").error_message
    limited = ask(good)
    assert "4 per minute (requests)" in limited.error_message
    with closing(stack.server.client()) as redis:
        redis.delete(meter_key(f"key:{made.key.id}", "minute"))
    assert not ask(good).error_message
    keyed.registry.revoke(made.key.id, int(time.time()))

    def ends() -> bool:
        sent.put(good)
        try:
            next(answers)
        except grpc.RpcError:
            return True
        return False

    wait_until(ends, 20, "the stream ends")
    assert answers.code() == grpc.StatusCode.UNAUTHENTICATED
    caller.channel.close()


def test_metrics_count_by_the_id_of_a_key(keyed: Keyed, globex: httpx.Client):
    """ES-048: requests with their outcome, jobs and tokens; the page has no secret."""
    made = keyed.key("counted", role="readonly", limits=KeyLimits(requests_per_day=3))
    with keyed.client(made) as client:
        assert client.post("/v1/jobs", json=job()).status_code == 403
        assert [client.get("/v2").status_code for _ in range(3)] == [200, 200, 429]
    assert globex.post("/v1/models/double:predict", json={"inputs": {"x": [ROW]}}).status_code == 200
    page = globex.get("/metrics").text
    families = {family.name: family.samples for family in text_string_to_metric_families(page)}
    requests = {
        sample.labels["outcome"]: sample.value
        for sample in families["penstock_api_key_requests"]
        if sample.labels["key"] == made.key.id and sample.name.endswith("_total")
    }
    assert requests == {"admitted": 3, "limited": 1, "denied": 1}
    assert made.key.id not in {sample.labels["key"] for sample in families["penstock_api_key_jobs"]}
    assert max(sample.value for sample in families["penstock_api_key_jobs"]) >= 1
    assert {sample.labels["kind"] for sample in families["penstock_api_key_tokens"]} == {"prompt", "generated"}
    assert made.text not in page
    assert "pk_" not in page


def test_keys_over_websocket(keyed: Keyed, globex: httpx.Client):
    """The handshake has the key. Each request counts for its limit, and sees the jobs of its tenant only."""
    made = keyed.key("websocket", tenant="initech", limits=KeyLimits(requests_per_minute=4))
    job_id = globex.post("/v1/jobs", json=job()).json()["id"]

    async def run() -> list[Any]:
        address = f"{keyed.gateway.url.replace('http', 'ws')}/predict/stream"
        with pytest.raises(InvalidStatus) as refused:
            await connect(address)
        async with connect(address, additional_headers={"X-API-Key": made.text}) as socket:
            found: list[Any] = [refused.value.response.status_code]
            for request in ({"model": "double", "inputs": {"x": [ROW]}}, {"job": job_id, "after": 0}, {"job": job_id}):
                await socket.send(json.dumps(request))
                found.append(json.loads(await socket.recv()))
        return found

    async def by_query() -> None:
        address = f"{keyed.gateway.url.replace('http', 'ws')}/predict/stream?model=double&api_key={made.text}"
        with pytest.raises(InvalidStatus):
            await connect(address)

    status, answered, unknown, limited = asyncio.run(run())
    asyncio.run(by_query())
    wait_until(lambda: "/predict/stream?model=double" in keyed.gateway.output.read_text(), 20, "the log has it")
    assert made.text not in keyed.gateway.output.read_text()
    assert (status, answered["type"]) == (401, "completed")
    # `key` and the handshake have used one each.
    assert [each["error"]["code"] for each in (unknown, limited)] == ["unknown-job", "rate-limited"]


def test_a_batch_runs_for_its_key(keyed: Keyed, globex: httpx.Client):
    """Its jobs are those of the key's tenant. Once the key is revoked, the lines that are left fail."""
    made = keyed.key("batches", tenant="initech")
    entry = {"method": "POST", "url": "/v1/models/napper:predict"}
    lines = [
        json.dumps({"custom_id": str(number), **entry, "body": {"inputs": {"x": [[number, 7, 7, 7]]}}})
        for number in range(16)
    ]
    with keyed.client(made) as client:
        batch_id = create_batch(client, entry["url"], lines)
        assert globex.get(f"/v1/batches/{batch_id}").status_code == 404

        def done() -> int:
            completed: int = client.get(f"/v1/batches/{batch_id}").json()["request_counts"]["completed"]
            return completed

        wait_until(lambda: done() > 0, 60, "a line has ended")
    keyed.registry.revoke(made.key.id, int(time.time()))
    with keyed.client(keyed.key("batches again", tenant="initech")) as client:

        def ended() -> Any:
            batch = client.get(f"/v1/batches/{batch_id}").json()
            return batch if batch["status"] == "completed" else None

        batch = wait_until(ended, 60, "the batch has ended")
        errors = [
            json.loads(line) for line in client.get(f"/v1/files/{batch['error_file_id']}/content").text.splitlines()
        ]
        output = client.get(f"/v1/files/{batch['output_file_id']}/content").text.splitlines()
        job_id = json.loads(output[0])["response"]["request_id"]
        assert client.get(f"/v1/jobs/{job_id}").json()["status"] == "completed"
    assert len(errors) + len(output) == 16
    assert {each["response"]["status_code"] for each in errors} == {401}
    assert globex.get(f"/v1/jobs/{job_id}").status_code == 404
