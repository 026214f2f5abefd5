"""OpenAI's client, unchanged: embeddings and the list of models."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.registry.broker.redis_streams import RedisStreams
from penstock.registry.package import load_package
from tests.gateway_process import GatewayProcess
from tests.producers.gateway.conftest import GatewayStack, write_embedder
from tests.producers.gateway.texts import Site, client_of
from tests.servers import RedisServer, require_module

VECTORS = [[letter / 255 for letter in text] for text in (b"abcd", b"efgh")]


@pytest.fixture
def openai(stack: GatewayStack) -> Iterator[Any]:
    """OpenAI's client of the shared gateway, without its own retries."""
    module = require_module("openai")
    with module.OpenAI(base_url=f"{stack.gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("encoding", [None, "float", "base64"])
def test_embeddings(openai: Any, encoding: str | None):
    """ES-008: a text, and texts, in every encoding; the client asks for base64 by itself."""
    options = {} if encoding is None else {"encoding_format": encoding}
    one = openai.embeddings.create(model="embedder", input="abcd", **options)
    many = openai.embeddings.create(model="embedder", input=["abcd", "efgh"], **options)
    assert [each.index for each in many.data] == [0, 1]
    assert many.model == "embedder"
    if encoding != "base64":
        assert one.data[0].embedding == pytest.approx(VECTORS[0], rel=1e-6)
        assert [each.embedding for each in many.data] == [pytest.approx(vector, rel=1e-6) for vector in VECTORS]


def test_the_asyncio_client_works_unchanged(stack: GatewayStack):
    """`AsyncOpenAI`: many requests at a time get each their own answer."""
    module = require_module("openai")

    async def ask() -> list[Any]:
        address = f"{stack.gateway.url}/v1"
        async with module.AsyncOpenAI(base_url=address, api_key="none", max_retries=0) as client:
            assert "embedder" in [model.id async for model in client.models.list()]
            texts = ["abcd", "efgh"] * 8
            return await asyncio.gather(*(client.embeddings.create(model="embedder", input=text) for text in texts))

    for number, found in enumerate(asyncio.run(ask())):
        assert found.data[0].embedding == pytest.approx(VECTORS[number % 2], rel=1e-6)


def test_models(openai: Any):
    """ES-043: the list, and one of it."""
    assert "embedder" in [model.id for model in openai.models.list()]
    assert openai.models.retrieve("embedder").owned_by == "penstock"


def test_default_is_the_only_model_of_its_kind(openai: Any, site: Site):
    """ES-043: `default` embeds with the only model that does, and is shown as the one that generates."""
    found = openai.embeddings.create(model="default", input="abcd")
    assert (found.model, found.data[0].embedding) == ("embedder", pytest.approx(VECTORS[0], rel=1e-6))
    assert openai.models.retrieve("default").id == "writer"
    assert openai.get("/models/default/active", cast_to=httpx.Response).json()["name"] == "writer"


def test_default_of_several_models_is_404(redis_server: RedisServer, tmp_path: Path):
    """Two models that embed: the name is ambiguous, and the text says so. One that has this very name is meant."""
    module = require_module("openai")
    gateway = GatewayProcess(redis_server, tmp_path).start()
    root = tmp_path / "models"
    try:
        with closing(RedisStreams.from_url(redis_server.url)) as broker, client_of(gateway) as openai:
            with pytest.raises(module.NotFoundError) as refused:
                openai.models.retrieve("default")
            assert refused.value.body["detail"].startswith("0 models are served. Expected the name of one")
            for name in ("first", "second"):
                write_embedder(root, name)
                broker.put_spec(name, load_package(root / name / "1").spec.to_json())
            with pytest.raises(module.NotFoundError, match="2 models embed texts"):
                openai.embeddings.create(model="default", input="abcd")
            with pytest.raises(module.NotFoundError) as refused:
                openai.models.retrieve("default")
            assert refused.value.body["detail"].startswith("2 models are served. Expected the name of one")
            write_embedder(root, "default")
            broker.put_spec("default", load_package(root / "default" / "1").spec.to_json())
            assert openai.models.retrieve("default").id == "default"
    finally:
        gateway.stop()


def test_errors_are_openais(openai: Any):
    """The client raises the class of each error, with a text that says what was expected."""
    module = require_module("openai")
    with pytest.raises(module.NotFoundError):
        openai.embeddings.create(model="nothing", input="abcd")
    with pytest.raises(module.UnprocessableEntityError, match="takes token numbers"):
        openai.embeddings.create(model="counter", input="abcd")


@pytest.mark.parametrize(
    "fields",
    [
        {"input": ""},
        {"input": []},
        {"input": ["a", ""]},
        {"input": ["a"] * 2049},
        {"input": [1, 2]},
        {"input": ["a", 1]},
        {"input": [[1], [2]]},
        {"input": {"a": 1}},
        {"input": "abcd", "dimensions": 3},
        {"input": "abcd", "encoding_format": "hex"},
        {},
    ],
)
def test_bad_input_is_422(http: httpx.Client, fields: dict[str, Any]):
    """In OpenAI's shape."""
    found = http.post("/v1/embeddings", json={"model": "embedder", **fields})
    assert found.status_code == 422
    assert found.json()["error"]["type"] == "invalid_request_error"
