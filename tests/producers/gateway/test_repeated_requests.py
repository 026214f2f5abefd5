"""Idempotency-Key beyond single jobs: what repeats a request gets the same jobs, or the same batch, or a clear 400."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock import Client
from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.test_content_types import post_routes
from tests.producers.gateway.test_keys import Keyed
from tests.producers.gateway.test_openai_batches import line
from tests.servers import wait_until

BATCH = "/v1/jobs:batch"
LINES = "\n".join(line(f"n{number}") for number in range(3))


def many(*rows: int, **fields: Any) -> dict[str, Any]:
    """A request for jobs of `double`, one a row."""
    return {"model": "double", "inputs": [{"x": [[row, 1, 2, 3]]} for row in rows], **fields}


def send(http: httpx.Client, path: str, document: dict[str, Any], key: str) -> httpx.Response:
    """A request with an idempotency key."""
    return http.post(path, json=document, headers={"Idempotency-Key": f'"{key}"'})


def upload(http: httpx.Client, headers: dict[str, str] | None = None) -> httpx.Response:
    """Uploads three lines."""
    files = {"file": ("lines.jsonl", LINES.encode())}
    return http.post("/v1/files", data={"purpose": "batch"}, files=files, headers=headers)


def new_file(http: httpx.Client) -> str:
    """The id of a new file of three lines."""
    return str(upload(http).json()["id"])


def wanted(file_id: str, **fields: Any) -> dict[str, Any]:
    """A request for a batch."""
    return {"input_file_id": file_id, "endpoint": "/v1/embeddings", "completion_window": "24h", **fields}


def test_repeated_jobs_are_those_of_the_first_request(http: httpx.Client, start_gateway: StartGateway):
    """Also through another gateway; another key has jobs of its own."""
    first = send(http, BATCH, many(1, 2, 3), "many-1").json()["jobs"]
    assert len({each["id"] for each in first}) == 3
    with start_gateway().client() as other:
        assert send(other, BATCH, many(1, 2, 3), "many-1").json()["jobs"] == first
        others = send(other, BATCH, many(1, 2, 3), "many-2").json()["jobs"]
    assert not {each["id"] for each in first} & {each["id"] for each in others}


def test_equal_inputs_in_two_places_are_two_jobs(stack: GatewayStack, http: httpx.Client):
    """The key of a place is its own."""
    jobs = send(http, BATCH, many(5, 5), "places").json()["jobs"]
    assert jobs[0]["id"] != jobs[1]["id"]
    with Client(stack.server.url) as client:
        assert [client.job(each["id"]).result(180)["y"][0, 0] for each in jobs] == [10, 10]


def test_another_input_in_a_place_is_refused_for_that_place(http: httpx.Client):
    """The other places have their jobs of the first request."""
    first = send(http, BATCH, many(1, 2), "changed").json()["jobs"]
    again = send(http, BATCH, many(1, 9), "changed").json()["jobs"]
    assert again[0] == first[0]
    assert (again[1]["status"], again[1]["error"]["code"]) == ("refused", "idempotency-conflict")


def test_one_key_for_all_or_one_for_each(http: httpx.Client):
    """Both together would contradict each other."""
    found = send(http, BATCH, many(1, idempotency_keys=["a"]), "both")
    assert found.status_code == 400
    assert "Expected one of both" in found.json()["detail"]


def test_a_repeated_batch_is_the_first_one(http: httpx.Client):
    """Also when its file is gone by now, and eight requests at a time; another key begins another batch."""
    file_id = new_file(http)
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: send(http, "/v1/batches", wanted(file_id), "batch-1"), range(8))]
    assert {each.status_code for each in found} == {200}, [each.text for each in found]
    (batch_id,) = {each.json()["id"] for each in found}
    assert batch_id.startswith("batch_")
    assert send(http, "/v1/batches", wanted(file_id), "batch-2").json()["id"] != batch_id
    assert [each["id"] for each in http.get("/v1/batches").json()["data"]].count(batch_id) == 1
    for each in (batch_id, send(http, "/v1/batches", wanted(file_id), "batch-2").json()["id"]):
        http.post(f"/v1/batches/{each}/cancel")
    _wait_ended(http, file_id)
    assert http.delete(f"/v1/files/{file_id}").status_code == 200
    assert send(http, "/v1/batches", wanted(file_id), "batch-1").json()["id"] == batch_id


def test_another_batch_with_a_key_is_422(http: httpx.Client):
    """A key belongs to what was asked for first: window, metadata and file."""
    file_id = new_file(http)
    assert send(http, "/v1/batches", wanted(file_id), "other").status_code == 200
    for change in ({"completion_window": "12h"}, {"metadata": {"a": "b"}}, {"input_file_id": new_file(http)}):
        found = send(http, "/v1/batches", wanted(file_id) | change, "other")
        assert found.status_code == 422, change
        assert found.json()["error"]["code"] == "idempotency_conflict"
        assert "Expected the same request" in found.json()["error"]["message"]


def test_tenants_share_no_keys_of_batches(start_gateway: StartGateway, tmp_path: Path):
    """The same key of another tenant begins a batch of its own."""
    url = f"sqlite:///{tmp_path / 'tenants.db'}"
    keyed = Keyed(start_gateway(PENSTOCK_REGISTRY_URL=url, PENSTOCK_INFERENCE_SERVER_API_KEYS="required"), url)
    ids = set()
    for tenant in ("north", "south"):
        with keyed.client(keyed.key(tenant, tenant=tenant)) as http:
            ids.add(send(http, "/v1/batches", wanted(new_file(http)), "same").json()["id"])
    assert len(ids) == 2


def test_an_upload_has_no_key(http: httpx.Client):
    """A retry would make a second file, so that a key is refused in place of being ignored."""
    found = upload(http, {"Idempotency-Key": "upload"})
    assert found.status_code == 400
    assert "Expected none" in found.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"), [("Idempotency-Key", '"'), ("Idempotency-Key", "a,b"), ("Prefer", "wait=x")]
)
def test_headers_out_of_grammar_are_400_on_every_post_route(http: httpx.Client, name: str, value: str):
    """Before the body is looked at."""
    for path in post_routes(http):
        found = http.post(path, json={}, headers={name: value})
        assert found.status_code == 400, (path, found.text)
        assert f"Bad {name}. Expected" in found.text, path


def _wait_ended(http: httpx.Client, file_id: str) -> None:
    def is_over() -> bool:
        listed = http.get("/v1/batches").json()["data"]
        return all(each["status"] in ("completed", "cancelled") for each in listed if each["input_file_id"] == file_id)

    wait_until(is_over, 60, "the batches of the file have ended")
