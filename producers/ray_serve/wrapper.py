"""The deployment: `serve.deployment(RayServeWrapper).bind("minilm")`."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, overload

from penstock.producers.async_client import AsyncClient
from penstock.producers.core import Inputs
from penstock.producers.ray_serve.config import RayServeConfig
from penstock.producers.ray_serve.requests import (
    Request,
    is_request,
    outputs_answer,
    problem_answer,
    read_request,
)
from penstock.producers.ray_serve.telemetry import telemetry_of
from penstock.registry.errors import PenstockError, ResultTimeout
from penstock.registry.queues import PriorityName, parse_name
from penstock.registry.tensors import Array

if TYPE_CHECKING:
    from starlette.responses import Response

__all__ = ["DEFAULT_CONFIG", "RayServeWrapper"]

DEFAULT_CONFIG: Final = RayServeConfig()
_closing: Final[set[asyncio.Task[None]]] = set()
"""Clients that a destructor closes: an event loop holds its tasks weakly."""


class RayServeWrapper:
    """A class for Ray Serve whose calls are jobs of one model. A replica has one client, and no model.

    The client connects with the first call or health check, in the event loop of the replica. Until then, and after
    it, the wrapper can be pickled: a copy connects anew.
    """

    _own: AsyncClient | None = None
    """Made by the first call. Not the one that was given."""

    def __init__(
        self,
        model: str,
        config: RayServeConfig = DEFAULT_CONFIG,
        *,
        version: str | None = None,
        url: str | None = None,
        client: AsyncClient | None = None,
    ) -> None:
        """version: None for the active one. url: of the broker; None for that in the settings of the replica.

        client: used in place of one of the wrapper's own, for tests: the caller closes it, and the wrapper cannot be
        pickled. Raises InvalidInput for a name that no model can have, and MissingRequirement where telemetry lacks
        its package.
        """
        self.model = parse_name("model", model)
        self.version = version
        self.config = config
        self._url = url
        self._given = client
        telemetry_of(config)

    @overload
    async def __call__(
        self, inputs: Request, *, priority: PriorityName = "normal", tenant: str | None = None
    ) -> Response: ...

    @overload
    async def __call__(
        self, inputs: Inputs, *, priority: PriorityName = "normal", tenant: str | None = None
    ) -> dict[str, Array]: ...

    async def __call__(
        self, inputs: Inputs | Request, *, priority: PriorityName = "normal", tenant: str | None = None
    ) -> Any:
        """The outputs by name. inputs: an array or nested lists for each input, with a row for each item.

        A request of HTTP names inputs and priority in its body, and gets an answer of HTTP, also for an error.
        tenant: None for that of the replica's settings. Raises as AsyncClient.submit and AsyncJobHandle.result do. The
        job is cancelled when the time of the call is up, and when the caller leaves.
        """
        if not is_request(inputs):
            return await self._counted(inputs, priority, tenant)
        try:
            return outputs_answer(self.model, await self._counted(inputs, priority, tenant))
        except PenstockError as error:
            return problem_answer(error)

    async def check_health(self) -> None:
        """Asks the broker, as Ray Serve does now and then. Raises BrokerUnavailable; Ray then replaces the replica."""
        client = self._client()
        client._enter_loop()
        await client._started()
        await client._broker.announced(self.model)

    async def close(self) -> None:
        """Closes the wrapper's own client. A later call connects anew."""
        client, self._own = self._own, None
        if client is not None:
            await client.aclose()

    def __del__(self) -> None:
        """Ray Serve calls this in the replica's event loop, when it stops the replica."""
        client, self._own = self._own, None
        if client is None:
            return
        # Outside of its loop the client cannot be closed: the connections end with the process.
        with suppress(RuntimeError):
            if (loop := asyncio.get_running_loop()) is client._loop:
                task = loop.create_task(client.aclose())
                _closing.add(task)
                task.add_done_callback(_closing.discard)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_own"}

    async def _counted(self, inputs: Any, priority: PriorityName, tenant: str | None) -> dict[str, Array]:
        with telemetry_of(self.config).counted(self.model) as call:
            if is_request(inputs):
                inputs, priority = await read_request(inputs)
            call.priority = self.config.priority(priority)
            return await self._run(inputs, call.priority, tenant)

    async def _run(self, inputs: Inputs, priority: PriorityName, tenant: str | None) -> dict[str, Array]:
        job = await self._client().submit(self.model, inputs, version=self.version, priority=priority, tenant=tenant)
        try:
            return await job.result(self.config.timeout_s)
        except (ResultTimeout, asyncio.CancelledError) as error:
            with suppress(PenstockError):
                await job.cancel()
            if isinstance(error, ResultTimeout):
                raise self.config.late() from None
            raise

    def _client(self) -> AsyncClient:
        if self._given is not None:
            return self._given
        if self._own is None:
            self._own = AsyncClient(self._url) if self._url is not None else AsyncClient.from_env()
        return self._own
