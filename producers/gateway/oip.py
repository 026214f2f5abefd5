"""The Open Inference Protocol v2 (KServe, Triton) over REST. `tritonclient.http` works unchanged.

GET  /v2, /v2/health/live, /v2/health/ready
GET  /v2/models/{name}[/versions/{version}][/ready]
POST /v2/models/{name}[/versions/{version}]/infer       oip_tensors.py: JSON, or JSON with bytes behind it
POST /v2/repository/index
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from penstock.producers.gateway.exchange import JSON, Exchange
from penstock.producers.gateway.fleet import GatewayClient, ServedModel
from penstock.producers.gateway.health import HealthRoutes
from penstock.producers.gateway.oip_tensors import InferRequest, read_infer, write_infer
from penstock.producers.gateway.oip_terms import (
    EXTENSIONS,
    SERVER_NAME,
    SERVER_VERSION,
    deadline_s_of,
    described,
    platform_of,
    priority_of,
    state_of,
    versions_of,
)
from penstock.producers.gateway.problems import Problem
from penstock.producers.gateway.request_headers import HEAD_HEADER, KEY_HEADER, idempotency_key
from penstock.producers.gateway.routing import ErrorShape, Route
from penstock.producers.gateway.tensors import BINARY, decoded
from penstock.producers.gateway.waiting import JobRequest, Jobs

__all__ = ["OipRoutes"]


class TensorMetadata(msgspec.Struct):
    """A tensor; an extent that varies is -1."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct):
    """A model of the protocol."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class IndexRequest(msgspec.Struct):
    """ready: whether to list only the models that a worker has in memory."""

    ready: bool = False


class InferAnswer(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The outputs, each with name, datatype, shape, and data or the size of its bytes behind the JSON."""

    model_name: str
    model_version: str
    outputs: list[dict[str, Any]]
    id: str = ""


class OipErrorView(msgspec.Struct):
    """How a request failed, as the protocol has it."""

    error: str


class OipRoutes:
    """The routes of the protocol."""

    def __init__(self, jobs: Jobs, health: HealthRoutes) -> None:
        self._jobs = jobs
        self._client: GatewayClient = jobs.client
        self._health = health

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        return [
            _route("GET", "/v2", self.show_server, "OIP: the server and its extensions"),
            _route(
                "GET", "/v2/health/live", self._health.show_live, "OIP: whether the process answers", needs="nothing"
            ),
            _route(
                "GET", "/v2/health/ready", self._health.show_ready, "OIP: whether jobs are answered", needs="nothing"
            ),
            _route(
                *("POST", "/v2/repository/index", self.show_index, "OIP: the models of the repository"),
                needs="look",
                takes=IndexRequest,
            ),
            *(
                route
                for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{version}")
                for route in (
                    _route("GET", path, self.show_model, "OIP: the metadata of a model", gives=ModelMetadata),
                    _route("GET", f"{path}/ready", self.show_ready, "OIP: whether a worker has the model"),
                    _route(
                        *("POST", f"{path}/infer", self.infer, "OIP: run a model"),
                        takes=InferRequest,
                        gives=InferAnswer,
                        also_takes=(BINARY,),
                        also_gives=(BINARY,),
                        parameters={**KEY_HEADER, **HEAD_HEADER},
                    ),
                )
            ),
        ]

    async def show_server(self, exchange: Exchange) -> None:
        """GET /v2."""
        facts = {"name": SERVER_NAME, "version": SERVER_VERSION, "extensions": EXTENSIONS}
        await exchange.answer(200, msgspec.json.encode(facts))

    async def show_index(self, exchange: Exchange) -> None:
        """POST /v2/repository/index."""
        body = await exchange.json_body()
        asked = decoded(body, IndexRequest) if body else IndexRequest()
        lines = [
            {
                "name": model.spec.name,
                "version": model.spec.version,
                "state": state_of(model),
            }
            for model in await self._client.models()
            if model.is_loaded or not asked.ready
        ]
        await exchange.answer(200, msgspec.json.encode(lines))

    async def show_model(self, exchange: Exchange) -> None:
        """GET /v2/models/{name}."""
        model = await self._model(exchange)
        spec = model.spec
        view = ModelMetadata(
            spec.name,
            versions_of(model),
            platform_of(model),
            [TensorMetadata(tensor.name, *described(tensor)) for tensor in spec.inputs],
            [TensorMetadata(tensor.name, *described(tensor)) for tensor in spec.outputs],
        )
        await exchange.answer(200, msgspec.json.encode(view))

    async def show_ready(self, exchange: Exchange) -> None:
        """GET /v2/models/{name}/ready."""
        model = await self._model(exchange)
        facts = {"name": model.spec.name, "ready": model.is_loaded}
        await exchange.answer(200 if model.is_loaded else 503, msgspec.json.encode(facts))

    async def infer(self, exchange: Exchange) -> None:
        """POST /v2/models/{name}/infer."""
        key = idempotency_key(exchange)
        request = read_infer(exchange, await exchange.body())
        name, version = exchange.words["name"], exchange.words.get("version")
        finished = await self._jobs.run(
            JobRequest(
                name,
                request.tensors,
                version=version,
                outputs=request.wanted,
                priority=priority_of(request.parameters),
                deadline_s=deadline_s_of(request.parameters),
                idempotency_key=key,
                traceparent=exchange.header(b"traceparent"),
            ),
            exchange,
        )
        body, head_length = write_infer(request, name, finished.info.version, finished.outputs)
        if head_length is None:
            await exchange.answer(200, body, JSON)
        else:
            length = (b"inference-header-content-length", b"%d" % head_length)
            await exchange.answer(200, body, b"application/octet-stream", (length,))

    async def _model(self, exchange: Exchange) -> ServedModel:
        return await self._client.model(exchange.words["name"], exchange.words.get("version"))


def _route(method: Any, path: str, handler: Any, summary: str, **further: Any) -> Route:
    return Route(method, path, handler, summary, error=_ERROR, **further)


def _written_error(problem: Problem) -> bytes:
    return msgspec.json.encode(OipErrorView(f"{problem.title}: {problem.detail}"))


_ERROR: Final = ErrorShape(_written_error, OipErrorView)
