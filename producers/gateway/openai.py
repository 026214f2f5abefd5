"""OpenAI's embeddings. The `openai` client works unchanged; its list of models is that of models.py.

    POST /v1/embeddings    input: a text, texts, a list of tokens, or lists of tokens (of one length where the model
                           takes numbers)

A model answers it that has one required input, of text or of token numbers, and one output of floats (rows, extent).
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final, Literal

import msgspec
import numpy as np

from penstock.producers.gateway.batches.batch_run import LineJob
from penstock.producers.gateway.default_model import embeds, or_default, vectors_of
from penstock.producers.gateway.exchange import Exchange
from penstock.producers.gateway.problems import Problem
from penstock.producers.gateway.request_headers import KEY_HEADER, idempotency_key
from penstock.producers.gateway.routing import ErrorShape, Route
from penstock.producers.gateway.tensors import decoded
from penstock.producers.gateway.token_counts import PackageTokenizers
from penstock.producers.gateway.waiting import JobRequest, Jobs
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import STRING, Array

__all__ = ["OpenAiRoutes", "OPENAI_ERROR"]

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


class Usage(msgspec.Struct):
    """The tokens that the model reads."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(msgspec.Struct):
    """The vectors, in the order of the inputs. usage: null where the gateway has no tokenizer of the model."""

    data: list[Embedding]
    model: str
    usage: Usage | None
    object: str = "list"


class OpenAiRoutes:
    """The routes of OpenAI's API."""

    def __init__(self, jobs: Jobs, tokenizers: PackageTokenizers) -> None:
        self._jobs = jobs
        self._tokenizers = tokenizers
        self._client = jobs.client

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        return [
            Route(
                *("POST", "/v1/embeddings", self.embed, "OpenAI: embed texts", EmbeddingFields, EmbeddingList),
                parameters=KEY_HEADER,
                error=OPENAI_ERROR,
            )
        ]

    async def embed(self, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        key = idempotency_key(exchange)
        job = await self.prepare_line({}, await exchange.json_body())
        await exchange.entry.spend(tokens=job.tokens)
        request = JobRequest(job.model, job.inputs, outputs=job.outputs, idempotency_key=key, prompt_tokens=job.tokens)
        finished = await self._jobs.run(request, exchange)
        await exchange.answer(200, job.write(finished.outputs, finished.info.version, finished.job_id))

    async def prepare_line(self, words: Mapping[str, str], body: bytes) -> LineJob:
        """The job of a request, or of a line of a batch. Raises InvalidInput and UnknownModel."""
        fields = decoded(body, EmbeddingFields)
        spec = await self._client.spec_of(await or_default(self._client, fields.model, embeds, "embed texts"))
        tensor, rows = _input_of(spec, fields.input)
        output = _output_of(spec, fields.dimensions)
        rows, usage = await self._read(spec, tensor, rows)
        as_text = _as_base64 if fields.encoding_format == "base64" else _as_numbers

        def write(outputs: Mapping[str, Array], _version: str, _job_id: str) -> bytes:
            vectors = outputs[output].astype(np.float32, copy=False)
            found = [Embedding(index, as_text(vector)) for index, vector in enumerate(vectors)]
            return msgspec.json.encode(EmbeddingList(found, spec.name, usage))

        return LineJob(
            spec.name,
            {tensor.name: rows},
            None,
            (output,),
            write,
            tokens=usage.total_tokens if usage else 0,
        )

    async def _read(self, spec: ModelSpec, tensor: TensorSpec, rows: list[Any]) -> tuple[list[Any], Usage | None]:
        """The rows as the model takes them, and their tokens. Token ids of a text model become their text."""
        if tensor.dtype != STRING:
            return rows, _usage(sum(map(len, rows)))
        tokenizer = await self._tokenizers.of(spec)
        if not isinstance(rows[0], str):
            if tokenizer is None:
                raise InvalidInput(f"{spec.name} takes text, and its tokenizer is not here. Expected texts")
            rows = [tokenizer.text_of(ids) for ids in rows]
        return rows, None if tokenizer is None else _usage(await tokenizer.count(rows))


class OpenAiErrorFields(msgspec.Struct):
    """What failed. message: what was expected. code: a name for programs."""

    message: str
    type: str
    param: str | None
    code: str


class OpenAiErrorView(msgspec.Struct):
    """How a request failed, in OpenAI's form."""

    error: OpenAiErrorFields


def _written_error(problem: Problem) -> bytes:
    kind = _KINDS.get(problem.status, "server_error" if problem.status >= 500 else "invalid_request_error")
    error = OpenAiErrorFields(problem.detail, kind, None, problem.code.replace("-", "_"))
    return msgspec.json.encode(OpenAiErrorView(error))


OPENAI_ERROR: Final = ErrorShape(_written_error, OpenAiErrorView)
"""An error as OpenAI's clients read it."""


def _usage(tokens: int) -> Usage:
    return Usage(tokens, tokens)


def _input_of(spec: ModelSpec, given: str | list[Any]) -> tuple[TensorSpec, list[Any]]:
    """(the input, its rows)."""
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
    if is_text and tensor.dtype != STRING:
        raise InvalidInput(f"{spec.name} takes token numbers. Expected that")
    if not is_text and any(type(number) is not int for row in rows for number in row):
        raise InvalidInput("A list of tokens holds something else. Expected whole numbers")
    return tensor, rows


def _output_of(spec: ModelSpec, dimensions: int | None) -> str:
    """The name of the output with the vectors."""
    found = vectors_of(spec)
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
