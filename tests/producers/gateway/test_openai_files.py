"""OpenAI's files, through OpenAI's client and by hand: upload, list, read, delete, and what is refused."""

from __future__ import annotations

import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.producers.gateway.conftest import GatewayStack, StartGateway
from tests.producers.gateway.test_openai_batches import EMBEDDINGS, answers, client_of, create, ended, line
from tests.servers import require_module

CONTENT = b'{"custom_id": "\xc3\xa9"}\r\n' * 40_000


@pytest.fixture
def openai(stack: GatewayStack) -> Iterator[Any]:
    """OpenAI's client of the shared gateway, without its own retries."""
    with client_of(stack.gateway) as client:
        yield client


def test_a_file_comes_back_as_it_was(openai: Any, stack: GatewayStack):
    """Byte for byte, over several blocks; only the owner of the process can read it on the disk."""
    file = openai.files.create(file=("lines.jsonl", CONTENT), purpose="batch")
    assert (file.bytes, file.filename, file.purpose) == (len(CONTENT), "lines.jsonl", "batch")
    assert openai.files.content(file.id).read() == CONTENT
    assert openai.files.retrieve(file.id) == file
    folder = stack.gateway.output.parent / "home" / "files"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_files_are_listed_and_deleted(openai: Any, stack: GatewayStack):
    """By pages, in either order. A deleted file is gone, from the disk too."""
    made = [openai.files.create(file=(f"{n}.jsonl", b"{}"), purpose="batch").id for n in range(3)]
    assert [file.id for file in openai.files.list(limit=2)][:3] == made[::-1]
    assert [file.id for file in openai.files.list(limit=2, order="asc", purpose="batch")][-3:] == made
    assert made[0] not in [file.id for file in openai.files.list(purpose="batch_output")]
    assert openai.files.delete(made[0]).deleted
    assert not (stack.gateway.output.parent / "home" / "files" / made[0]).exists()
    module = require_module("openai")
    for call in (openai.files.retrieve, openai.files.content, openai.files.delete):
        with pytest.raises(module.NotFoundError):
            call(made[0])


def test_a_file_that_a_batch_reads_stays(openai: Any, stack: GatewayStack):
    """Its deletion is refused until the batch has ended."""
    stack.worker.freeze()
    try:
        batch = create(openai, [line("a")])
        with pytest.raises(require_module("openai").ConflictError):
            openai.files.delete(batch.input_file_id)
    finally:
        stack.worker.thaw()
    ended(openai, batch.id)
    assert openai.files.delete(batch.input_file_id).deleted


@pytest.mark.parametrize(
    ("form", "content"),
    [
        ({"purpose": "fine-tune"}, b"{}"),
        ({}, b"{}"),
        ({"purpose": "batch"}, b""),
        ({"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "5"}, b"{}"),
        ({"purpose": "x" * 10_000}, b"{}"),
    ],
)
def test_bad_upload_is_422(http: httpx.Client, form: dict[str, str], content: bytes):
    """With what was expected, and nothing is kept."""
    before = http.get("/v1/files").json()["data"]
    found = http.post("/v1/files", data=form, files={"file": ("a.jsonl", content)})
    assert found.status_code == 422
    assert "Expected" in found.json()["error"]["message"]
    assert http.get("/v1/files").json()["data"] == before


def test_limits_of_files(start_gateway: StartGateway):
    """A file over max_file_mb is 413, a store over max_stored_mb 507."""
    gateway = start_gateway(PENSTOCK_INFERENCE_BATCHES_MAX_FILE_MB="1", PENSTOCK_INFERENCE_BATCHES_MAX_STORED_MB="2")
    mib = b"x" * (1 << 20)
    with gateway.client() as http:

        def upload(content: bytes) -> int:
            return http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", content)}).status_code

        assert upload(mib + b"x") == 413
        assert [upload(mib) for _ in range(3)] == [200, 200, 507]


def test_another_tenants_files_and_batches_do_not_exist(openai: Any, start_gateway: StartGateway, stack: GatewayStack):
    """404 for each id, in each route, and empty lists."""
    batch = ended(openai, create(openai, [line("a")]).id)
    folder = stack.gateway.output.parent / "home" / "files"
    other = start_gateway(PENSTOCK_TENANT_ID="other", PENSTOCK_INFERENCE_BATCHES_PATH=str(folder))
    module = require_module("openai")
    with client_of(other) as client:
        for call in (
            lambda: client.files.retrieve(batch.input_file_id),
            lambda: client.files.content(batch.output_file_id),
            lambda: client.files.delete(batch.output_file_id),
            lambda: client.files.list(after=batch.input_file_id),
            lambda: client.batches.retrieve(batch.id),
            lambda: client.batches.cancel(batch.id),
            lambda: client.batches.list(after=batch.id),
            lambda: client.batches.create(
                input_file_id=batch.input_file_id, endpoint=EMBEDDINGS, completion_window="24h"
            ),
        ):
            with pytest.raises(module.NotFoundError):
                call()
        assert list(client.files.list()) == []
        assert list(client.batches.list()) == []


def test_files_are_sealed_where_payloads_are(start_gateway: StartGateway, tmp_path: Path):
    """No text of a file, its name or an answer lies on the disk in the mode persisted_encrypted."""
    folder = tmp_path / "files"
    gateway = start_gateway(
        PENSTOCK_INFERENCE_PRIVACY_MODE="persisted_encrypted",
        PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS="off",
        PENSTOCK_L2_ENCRYPTION_KEY="ab" * 32,
        PENSTOCK_INFERENCE_BATCHES_PATH=str(folder),
    )
    with client_of(gateway) as client:
        file = client.files.create(file=("secret-name.jsonl", line("a", "secret text").encode()), purpose="batch")
        batch = client.batches.create(input_file_id=file.id, endpoint=EMBEDDINGS, completion_window="24h")
        batch = ended(client, batch.id)
        assert batch.status == "completed"
        assert answers(client, batch.output_file_id).keys() == {"a"}
        assert client.files.content(file.id).read() == line("a", "secret text").encode()
    stored = b"".join(path.read_bytes() for path in folder.iterdir())
    for text in (b"secret", b"custom_id", b"embedding"):
        assert text not in stored


def test_hashes_only_keeps_no_files(start_gateway: StartGateway):
    """The routes say so with 403."""
    gateway = start_gateway(
        PENSTOCK_INFERENCE_PRIVACY_MODE="hashes_only", PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS="off"
    )
    with gateway.client() as http:
        found = http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("a", b"{}")})
        assert found.status_code == 403
        assert "hashes_only" in found.json()["error"]["message"]
        assert http.get("/v1/batches").status_code == 403
