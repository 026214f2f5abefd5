"""OpenAI's client, unchanged: embeddings and the list of models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.producers.gateway.conftest import GatewayStack
from tests.servers import require_module

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


def test_models(openai: Any):
    """ES-043: the list, and one of it."""
    assert "embedder" in [model.id for model in openai.models.list()]
    assert openai.models.retrieve("embedder").owned_by == "penstock"


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
