"""Requests of clients to load and to unload versions, where the operators let the gateway make them.

    POST /v1/models:load -> DesiredVersion in the store of model states -> workers follow it -> their reports -> answer

The answer comes once the live workers of the model have reported. Where operators sign their requests, a gateway, which
has no key of theirs, makes none. The active version is never unloaded on request.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

import msgspec

from penstock.producers.gateway.callers import entered
from penstock.producers.gateway.exchange import Exchange, RequestRefused
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.gateway.routing import Route
from penstock.producers.gateway.tensors import decoded
from penstock.registry import stack_file
from penstock.registry.desired_state import DesiredVersion, StateStore
from penstock.registry.errors import InvalidInput, ModelNotReady, QueueFull, ResultTimeout, UnknownModel
from penstock.registry.settings import Settings
from penstock.registry.settings_sections import LATEST

__all__ = ["ModelControlRoutes"]

_POLL_S: Final = 0.25
"""Workers report once a second."""
_MOST_WAITING: Final = 16
_VERSION: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class VersionFields(msgspec.Struct, forbid_unknown_fields=True):
    """A version of a model; without one the active version."""

    name: str
    version: str | None = None


class LoadedView(msgspec.Struct):
    """loaded: a worker has confirmed it. workers: those that have the version in memory."""

    loaded: bool
    workers: list[str]


class UnloadedView(msgspec.Struct):
    """unloaded: no worker has the version in memory."""

    unloaded: bool


class ModelControlRoutes:
    """The routes that change what is in memory."""

    def __init__(self, client: GatewayClient, settings: Settings) -> None:
        self._client = client
        self._settings = settings
        self._waiting = 0

    @property
    def routes(self) -> list[Route]:
        """The routes, for the table of the application."""
        return [
            Route(
                "POST",
                "/v1/models:load",
                self.load,
                "Load a version in all workers",
                VersionFields,
                LoadedView,
                needs="admin",
            ),
            Route(
                *("POST", "/v1/models:unload", self.unload, "Unload a version in all workers"),
                takes=VersionFields,
                gives=UnloadedView,
                needs="admin",
            ),
        ]

    async def load(self, exchange: Exchange) -> None:
        """POST /v1/models:load."""
        name, version = await self._asked(exchange)
        workers = await self._load(name, version, exchange)
        await exchange.answer(200, msgspec.json.encode(LoadedView(loaded=True, workers=workers)))

    async def load_shown(self, name: str, version: str, exchange: Exchange) -> None:
        """Loads a version that a caller looks at, as `load` does, where it may; else and after a failure nothing."""
        if self._refusal() is None and entered().role == "admin":
            with suppress(UnknownModel, ModelNotReady, ResultTimeout, QueueFull):
                await self._load(name, version, exchange)

    async def unload(self, exchange: Exchange) -> None:
        """POST /v1/models:unload."""
        name, version = await self._asked(exchange)
        with self._place():
            entries = await self._entries(name, version)
            if any(entry.get("is_active") for entry in entries.values()):
                raise RequestRefused(409, "The active version answers jobs. Expected another version")
            await self._put(DesiredVersion(name, version, is_wanted=False, at=time.time()))
            await self._await_unloaded(name, version, exchange)
        await exchange.answer(200, msgspec.json.encode(UnloadedView(unloaded=True)))

    async def _asked(self, exchange: Exchange) -> tuple[str, str]:
        """(name, version) of a request. Raises RequestRefused where requests are not the gateway's to make."""
        fields = decoded(await exchange.json_body(), VersionFields)
        if (refusal := self._refusal()) is not None:
            raise RequestRefused(403, refusal)
        spec = await self._client.spec_of(fields.name)
        version = spec.version if fields.version is None or fields.version == LATEST else fields.version
        if not _VERSION.fullmatch(version):
            raise InvalidInput("Bad version. Expected letters, digits, dots, underscores and hyphens")
        return spec.name, version

    def _refusal(self) -> str | None:
        """Why the gateway makes no such requests; None: it does."""
        if not self._settings.inference.server.model_control:
            return "Loading is off. Expected server.model_control, or `penstock models load`"
        if stack_file.with_broker(self._settings).operator_public_keys:
            return "Operators sign such requests here. Expected `penstock models load`"
        return None

    async def _load(self, name: str, version: str, exchange: Exchange) -> list[str]:
        """The workers that have the version in memory, once all have reported."""
        with self._place():
            before = await self._entries(name, version)
            await self._put(DesiredVersion(name, version, at=time.time()))
            return await self._await_loaded(name, version, before, exchange)

    async def _put(self, desired: DesiredVersion) -> None:
        inference = self._settings.inference
        url = inference.state_redis_url or stack_file.with_broker(self._settings).redis_url or ""

        def put() -> None:
            store = StateStore.from_url(url, inference.state_prefix)
            try:
                store.put(desired)
            finally:
                store.close()

        await asyncio.to_thread(put)

    async def _await_loaded(self, name: str, version: str, before: dict[str, Any], exchange: Exchange) -> list[str]:
        """The workers that have it in memory, once each has loaded it or failed anew."""
        inference = self._settings.inference
        begun = time.monotonic()
        # A failure that is older than the request counts once workers must have read the request.
        read_by = begun + inference.state_reconcile_interval_s + 2
        with exchange.watch():
            while time.monotonic() < begun + inference.load_timeout_s:
                entries = await self._entries(name, version)
                states = {worker: entry.get("state") for worker, entry in entries.items()}
                ready = [worker for worker, state in states.items() if state == "ready"]
                failed = [
                    worker
                    for worker, state in states.items()
                    if state == "failed" and (entries[worker] != before.get(worker) or time.monotonic() > read_by)
                ]
                if states and len(ready) + len(failed) == len(states):
                    if not ready:
                        raise ModelNotReady("No worker could load the version. Expected one under their models root")
                    return sorted(ready)
                await asyncio.sleep(_POLL_S)
        raise ResultTimeout(f"No worker has confirmed within {inference.load_timeout_s:g} s; the request stays")

    async def _await_unloaded(self, name: str, version: str, exchange: Exchange) -> None:
        timeout_s = self._settings.inference.load_timeout_s
        begun = time.monotonic()
        with exchange.watch():
            while time.monotonic() < begun + timeout_s:
                entries = await self._entries(name, version)
                if all(entry.get("state") not in ("ready", "loading") for entry in entries.values()):
                    return
                await asyncio.sleep(_POLL_S)
        raise ResultTimeout(f"A worker still has the version after {timeout_s:g} s; the request stays")

    async def _entries(self, name: str, version: str) -> dict[str, dict[str, Any]]:
        """What each live worker of the model reports of the version. Raises UnknownModel without such a worker."""
        entries = {
            report["name"]: report["versions"][name].get(version, {})
            for report in await self._client.reports()
            if name in report.get("versions", {})
        }
        if not entries:
            raise UnknownModel(f"No live worker serves {name}. Expected a model of a running worker")
        return entries

    @contextmanager
    def _place(self) -> Iterator[None]:
        if self._waiting >= _MOST_WAITING:
            raise QueueFull(f"{_MOST_WAITING} such requests wait in this process. Expected a retry after 1 s", 1)
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1
