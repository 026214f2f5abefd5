"""OpenAI's embeddings. The `openai` client works unchanged; its list of models is that of models.py.

    POST /v1/embeddings    input: a text, texts, a list of tokens, or lists of tokens of one length

A model answers it that has one required input, of text or of token numbers, and one output of floats (rows, extent).
"""

from __future__ import annotations

import base64
from typing import Any, Final, Literal

import msgspec
import numpy as np

from penstock.producers.gateway.exchange import JSON, Exchange
from penstock.producers.gateway.problems import Problem
from penstock.producers.gateway.request_headers import idempotency_key
from penstock.producers.gateway.routing import Route
from penstock.producers.gateway.tensors import decoded
from penstock.producers.gateway.waiting import JobRequest, Jobs
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec
from penstock.registry.tensors import STRING, Array

__all__ = ["OpenAiRoutes", "openai_error"]

_MOST_INPUTS: Final = 2048
"""Of one request, as OpenAI has it."""
_KINDS: Final = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class EmbeddingFields(msgspec.Struct, kw_only=True):
    """A request for embeddings. Fields that OpenAI has beside these are ignored."""

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None


class Embedding(msgspec.Struct):
    """The vector of one input: numbers, or the base64 of its float32, little-endian."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingList(msgspec.Struct):
    """The vectors, in the order of the inputs."""

    data: list[Embedding]
    model: str
    object: str = "list"


class OpenAiRoutes:
    """The routes of OpenAI's API."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._client = jobs.client

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        return [
            Route(
                *("POST", "/v1/embeddings", self.embed, "OpenAI: embed texts", EmbeddingFields, EmbeddingList),
                write_problem=openai_error,
            )
        ]

    async def embed(self, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        key = idempotency_key(exchange)
        fields = decoded(await exchange.body(), EmbeddingFields)
        spec = await self._client.spec_of(fields.model)
        name, rows = _input_of(spec, fields.input)
        output = _output_of(spec, fields.dimensions)
        # The tokens of a text are counted by its model only.
        await exchange.entry.spend(tokens=sum(len(row) for row in rows if not isinstance(row, str)))
        request = JobRequest(spec.name, {name: rows}, outputs=(output,), idempotency_key=key)
        finished = await self._jobs.run(request, exchange)
        vectors = finished.outputs[output].astype(np.float32, copy=False)
        write = _as_base64 if fields.encoding_format == "base64" else _as_numbers
        found = [Embedding(index, write(vector)) for index, vector in enumerate(vectors)]
        await exchange.answer(200, msgspec.json.encode(EmbeddingList(found, spec.name)))


def openai_error(problem: Problem) -> tuple[bytes, bytes]:
    """An error as OpenAI's clients read it."""
    kind = _KINDS.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    error = {"message": problem.detail, "type": kind, "param": None, "code": problem.code.replace("-", "_")}
    return msgspec.json.encode({"error": error}), JSON


def _input_of(spec: ModelSpec, given: str | list[Any]) -> tuple[str, list[Any]]:
    """(name of the input, its rows)."""
    required = [tensor for tensor in spec.inputs if not tensor.optional]
    if len(required) != 1:
        raise InvalidInput(
            f"{spec.name} needs {len(required)} inputs. Expected a model with one input of text or tokens"
        )
    (tensor,) = required
    rows = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    kinds = {type(row) for row in rows}
    if len(kinds) > 1:
        raise InvalidInput("Texts and tokens are mixed. Expected texts, or lists of tokens")
    is_text = kinds == {str}
    if not 0 < len(rows) <= _MOST_INPUTS or not all(rows):
        raise InvalidInput(f"An empty input, or too many. Expected 1 to {_MOST_INPUTS}, none of them empty")
    if is_text != (tensor.dtype == STRING):
        raise InvalidInput(f"{spec.name} takes {'text' if tensor.dtype == STRING else 'token numbers'}. Expected that")
    return tensor.name, rows


def _output_of(spec: ModelSpec, dimensions: int | None) -> str:
    """The name of the output with the vectors."""
    found = [tensor for tensor in spec.outputs if tensor.dtype.startswith("float") and len(tensor.shape) == 2]
    if len(found) != 1:
        raise InvalidInput(f"{spec.name} has {len(found)} outputs of vectors. Expected a model with one")
    extent = found[0].shape[1]
    if dimensions not in (None, extent):
        raise InvalidInput(f"dimensions is {dimensions}. Expected {extent}, which {spec.name} has, or none")
    return found[0].name


def _as_numbers(vector: Array) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


def _as_base64(vector: Array) -> str:
    return base64.b64encode(vector.astype("<f4", copy=False).tobytes()).decode("ascii")
