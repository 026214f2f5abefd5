"""A prediction in one request: submit, wait, answer. The job is cancelled when the client does not wait for it.

POST /v1/models/{name}:predict                         {"inputs": {name: {dtype, shape, data | base64}}}
POST /v1/models/{name}/versions/{version}:predict      the same of a fixed version
POST /predict                                          {"inputs": [numbers]} of the only model, or of ?model=
POST /predict, /predict/batch                          {"batch": [[numbers], ...]}
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from penstock.producers.gateway.batches.batch_run import LineJob
from penstock.producers.gateway.exchange import JSON, Exchange
from penstock.producers.gateway.flat_rows import flat_rows, named_model, only_input
from penstock.producers.gateway.request_headers import HEAD_HEADER, KEY_HEADER, idempotency_key, wanted_type
from penstock.producers.gateway.routing import Route
from penstock.producers.gateway.tensors import (
    TENSOR_TYPES,
    Document,
    decoded,
    fields_of,
    json_document,
    read_document,
    read_inputs,
    write_outputs,
)
from penstock.producers.gateway.waiting import JobRequest, Jobs
from penstock.registry.errors import InvalidInput
from penstock.registry.queues import PriorityName
from penstock.registry.tensors import Array

__all__ = ["PredictFields", "PredictRoutes"]

_JSON: Final = JSON.decode()


class PredictFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """inputs: a tensor for each input. outputs: the wanted ones; none: all. timeout_ms: how long the job may queue."""

    inputs: dict[str, Any]
    outputs: list[str] = []
    timeout_ms: float | None = None
    version: str | None = None
    priority: PriorityName = "normal"


class _JsonFields(PredictFields, forbid_unknown_fields=True, kw_only=True):
    """The same in JSON; each input stays JSON text until the model is known."""

    inputs: dict[str, msgspec.Raw]


_decode_json = msgspec.json.Decoder(_JsonFields).decode


class Prediction(msgspec.Struct):
    """The outputs, each with dtype, shape, and data or base64."""

    model: str
    version: str
    outputs: dict[str, Any]


class FlatFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One row of 1 to 10,000 numbers, or rows of one length."""

    inputs: list[float] | None = None
    batch: list[list[float]] | None = None
    model_version: str | None = None


class FlatPrediction(msgspec.Struct):
    """predictions: of `inputs` one row, of `batch` one row for each. latency_ms: from the request to the result."""

    predictions: Any
    model_version: str
    latency_ms: float


class PredictRoutes:
    """The routes of predictions."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs
        self._client = jobs.client

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        of_model = (self.predict, "Run a model and wait for its outputs", PredictFields, Prediction)
        flat = (self.predict_flat, "Run a model on plain numbers", FlatFields, FlatPrediction)
        which = {"model": "the name of the model; not needed while one is served", **KEY_HEADER}
        return [
            *(
                Route(
                    *("POST", path, *of_model),
                    parameters={**KEY_HEADER, **HEAD_HEADER},
                    also_takes=TENSOR_TYPES,
                    also_gives=TENSOR_TYPES,
                )
                for path in ("/v1/models/{name}:predict", "/v1/models/{name}/versions/{version}:predict")
            ),
            Route("POST", "/predict", *flat, parameters=which),
            Route("POST", "/predict/batch", *flat, parameters=which),
        ]

    async def predict(self, exchange: Exchange) -> None:
        """POST /v1/models/{name}:predict."""
        key = idempotency_key(exchange)
        fields, document = _opened(exchange, await exchange.body())
        version = exchange.words.get("version", fields.version)
        spec = await self._client.spec_of(exchange.words["name"], version)
        finished = await self._jobs.run(
            JobRequest(
                spec.name,
                read_inputs(spec, document),
                version=version,
                outputs=tuple(fields.outputs),
                priority=fields.priority,
                deadline_s=_deadline_s(fields.timeout_ms),
                idempotency_key=key,
                traceparent=exchange.header(b"traceparent"),
            ),
            exchange,
        )
        facts = {"model": spec.name, "version": finished.info.version}
        body, kind, headers = write_outputs(finished.outputs, spec.codecs.default, facts, wanted_type(exchange))
        await exchange.answer(200, body, kind, headers)

    async def prepare_line(self, words: Mapping[str, str], body: bytes) -> LineJob:
        """The job of a line of a batch, which is the body of a prediction. Raises as a prediction does."""
        fields, document = _opened_json(body) or _checked(json_document(body))
        if fields.priority != "normal" or fields.timeout_ms is not None:
            raise InvalidInput("Found priority or timeout_ms. Expected none: a batch runs at low priority")
        version = words.get("version", fields.version)
        name = words["name"]
        spec = self._client.spec_at_hand(name, version) or await self._client.spec_of(name, version)

        def write(outputs: Mapping[str, Array], answered: str, _job_id: str) -> bytes:
            facts = {"model": spec.name, "version": answered}
            return write_outputs(outputs, spec.codecs.default, facts, JSON)[0]

        return LineJob(spec.name, read_inputs(spec, document), version, tuple(fields.outputs), write)

    async def predict_flat(self, exchange: Exchange) -> None:
        """POST /predict."""
        begun = asyncio.get_running_loop().time()
        fields = decoded(await exchange.json_body(), FlatFields)
        model = await named_model(self._client, exchange.query().get("model"))
        spec = await self._client.spec_of(model, fields.model_version)
        if (fields.inputs is None) == (fields.batch is None):
            raise InvalidInput("Found both or none of inputs and batch. Expected one of them")
        rows = flat_rows([fields.inputs] if fields.inputs is not None else fields.batch or [])
        request = JobRequest(
            spec.name,
            {only_input(spec, rows): rows},
            version=fields.model_version,
            idempotency_key=idempotency_key(exchange),
        )
        finished = await self._jobs.run(request, exchange)
        answers: list[Any] = next(iter(finished.outputs.values())).tolist()
        await exchange.answer(
            200,
            msgspec.json.encode(
                FlatPrediction(
                    answers[0] if fields.inputs is not None else answers,
                    finished.info.version,
                    round((asyncio.get_running_loop().time() - begun) * 1000, 3),
                )
            ),
        )


def _opened(exchange: Exchange, body: bytes) -> tuple[PredictFields, Document]:
    if exchange.media_type in ("", _JSON) and (opened := _opened_json(body)) is not None:
        return opened
    return _checked(read_document(exchange, body))


def _opened_json(body: bytes) -> tuple[PredictFields, Document] | None:
    """In one pass over the text; None: something is wrong, and the plain way says what."""
    try:
        fields = _decode_json(body)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
    return fields, Document({"inputs": fields.inputs}, memoryview(b""), JSON)


def _checked(document: Document) -> tuple[PredictFields, Document]:
    return fields_of(document, PredictFields), document


def _deadline_s(timeout_ms: float | None) -> float | None:
    if timeout_ms is not None and not timeout_ms > 0:
        raise InvalidInput(f"timeout_ms is {timeout_ms:g}. Expected a positive number of milliseconds")
    return None if timeout_ms is None else timeout_ms / 1000
