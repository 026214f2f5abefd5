"""The client of the gateway: an AsyncClient that also tells which models are served, and by which workers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from penstock.producers.async_client import AsyncClient
from penstock.registry.broker.base import Backlog
from penstock.registry.errors import UnknownModel
from penstock.registry.package import ModelSpec

__all__ = ["GatewayClient", "ServedModel"]


class ServedModel(NamedTuple):
    """A model whose jobs are accepted. loaded: its versions by the names of the workers that have them in memory."""

    spec: ModelSpec
    loaded: Mapping[str, tuple[str, ...]]
    since: int
    """When the oldest worker that has it in memory started, in Unix time; 0 without one."""
    content_hash: str
    """Of the version of the spec; empty while no worker has it in memory."""

    @property
    def is_loaded(self) -> bool:
        """Whether a worker has the version of the spec in memory."""
        return self.spec.version in self.loaded


class GatewayClient(AsyncClient):
    """An AsyncClient that shows models, too."""

    async def spec_of(self, model: str, version: str | None = None) -> ModelSpec:
        """The spec of the active version, or of the named one. Raises UnknownModel."""
        self._enter_loop()
        return (None if version else self._specs.fresh(model)) or await self._spec(model, version)

    async def models(self) -> list[ServedModel]:
        """The models whose jobs are accepted, by name. Raises BrokerUnavailable."""
        self._enter_loop()
        names, reports = await asyncio.gather(self._broker.models(), self._reports())
        found = await asyncio.gather(*(self._served(name, reports) for name in names))
        return [model for model in found if model is not None]

    async def model(self, name: str, version: str | None = None) -> ServedModel:
        """One model, or the named version of it. Raises UnknownModel."""
        spec = await self.spec_of(name, version)
        return _described(spec, await self._reports())

    async def ready_workers(self) -> list[Mapping[str, Any]]:
        """The reports of the workers that claim jobs. Raises BrokerUnavailable."""
        self._enter_loop()
        return [report for report in await self._reports() if report.get("ready")]

    async def backlog(self, model: str) -> Backlog:
        """The jobs of a model that have not ended, and how many were committed so far. Raises BrokerUnavailable."""
        self._enter_loop()
        return await self._broker.backlog(model)

    async def _reports(self) -> list[Mapping[str, Any]]:
        return [json.loads(report) for report in await self._broker.workers()]

    async def _served(self, name: str, reports: list[Mapping[str, Any]]) -> ServedModel | None:
        try:
            return _described(await self.spec_of(name), reports)
        except UnknownModel:
            # A name that outlived its spec.
            return None


def _described(spec: ModelSpec, reports: list[Mapping[str, Any]]) -> ServedModel:
    loaded: dict[str, list[str]] = {}
    starts: list[float] = []
    content_hash = ""
    for report in reports:
        for version, entry in report.get("versions", {}).get(spec.name, {}).items():
            if entry["state"] == "ready":
                loaded.setdefault(version, []).append(report["name"])
                starts.append(report["started"])
                content_hash = entry["content_hash"] if version == spec.version else content_hash
    versions = {version: tuple(names) for version, names in loaded.items()}
    return ServedModel(spec, versions, int(min(starts, default=0)), content_hash)
