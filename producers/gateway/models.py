"""The models whose jobs are accepted, for people, for clients of Inferno's routes and for the `openai` client.

GET /v1/models                  all of them; GET /v1/models?loaded=true only those that a worker has in memory
GET /v1/models/{name}           one, with its inputs and outputs; loads it where the gateway may load
GET /v1/models/{name}/active    the version that answers

The name `default` stands for the only model of a kind: default_model.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.producers.gateway.default_model import any_default
from penstock.producers.gateway.exchange import Exchange
from penstock.producers.gateway.fleet import GatewayClient, ServedModel
from penstock.producers.gateway.model_control import ModelControlRoutes
from penstock.producers.gateway.routing import Route
from penstock.registry.errors import InvalidInput
from penstock.registry.package.signature import TensorSpec

__all__ = ["ModelRoutes"]


class ModelLine(msgspec.Struct, kw_only=True):
    """A model. created: when the oldest of its live workers started, in Unix time; 0 without one.

    loaded_versions: those that a worker has in memory.
    """

    id: str
    object: str = "model"
    created: int
    owned_by: str = "penstock"
    active_version: str
    loaded_versions: list[str]


class ModelList(msgspec.Struct):
    """All models, by name."""

    data: list[ModelLine]
    object: str = "list"


class TensorView(msgspec.Struct):
    """One input or output. shape: extents; a name stands for an extent that varies."""

    name: str
    dtype: str
    shape: list[int | str]
    optional: bool


class ModelView(ModelLine, kw_only=True):
    """A model with its signature. content_hash: SHA-256 of the version in memory; empty without one."""

    name: str
    version: str
    content_hash: str
    format: str
    streams: bool
    inputs: list[TensorView]
    outputs: list[TensorView]


class ActiveView(msgspec.Struct):
    """The version that answers jobs that name none. loaded: whether a worker has it in memory."""

    name: str
    version: str
    loaded: bool


class ModelRoutes:
    """The routes of models."""

    def __init__(self, client: GatewayClient, control: ModelControlRoutes) -> None:
        self._client = client
        self._control = control

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        only = {"loaded": "true: only models that a worker has in memory"}
        return [
            Route("GET", "/v1/models", self.show_all, "List the models", gives=ModelList, parameters=only),
            Route("GET", "/v1/models/{name}", self.show, "Show a model and its signature", gives=ModelView),
            Route("GET", "/v1/models/{name}/active", self.show_active, "Show the active version", gives=ActiveView),
        ]

    async def show_all(self, exchange: Exchange) -> None:
        """GET /v1/models."""
        wanted = exchange.query().get("loaded", "false")
        if wanted not in ("true", "false"):
            raise InvalidInput("Bad loaded. Expected true or false")
        found = [model for model in await self._client.models() if wanted == "false" or model.loaded]
        await exchange.answer(200, msgspec.json.encode(ModelList([ModelLine(**_line(model)) for model in found])))

    async def show(self, exchange: Exchange) -> None:
        """GET /v1/models/{name}."""
        model = await self._named(exchange)
        if not model.is_loaded:
            await self._control.load_shown(model.spec.name, model.spec.version, exchange)
            model = await self._client.model(model.spec.name)
        spec = model.spec
        view = ModelView(
            **_line(model),
            name=spec.name,
            version=spec.version,
            content_hash=model.content_hash,
            format=spec.format,
            streams=spec.streams,
            inputs=[_view(tensor) for tensor in spec.inputs],
            outputs=[_view(tensor) for tensor in spec.outputs],
        )
        await exchange.answer(200, msgspec.json.encode(view))

    async def show_active(self, exchange: Exchange) -> None:
        """GET /v1/models/{name}/active."""
        model = await self._named(exchange)
        view = ActiveView(model.spec.name, model.spec.version, model.is_loaded)
        await exchange.answer(200, msgspec.json.encode(view))

    async def _named(self, exchange: Exchange) -> ServedModel:
        """The model of the path. Raises UnknownModel."""
        return await self._client.model(await any_default(self._client, exchange.words["name"]))


def _line(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.spec.name,
        "created": model.since,
        "active_version": model.spec.version,
        "loaded_versions": sorted(model.loaded),
    }


def _view(tensor: TensorSpec) -> TensorView:
    return TensorView(tensor.name, tensor.dtype, list(tensor.shape), tensor.optional)
