"""A model as an argument of a route: `Depends(model("minilm"))`.

    model("minilm") -- awaited for each request --> Model --> the loop's AsyncClient --> job --> outputs

The client connects with the first job. `close_client` belongs where the application ends.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from penstock.producers.async_client import AsyncClient, AsyncJobHandle
from penstock.producers.core import Inputs
from penstock.registry.errors import PenstockError
from penstock.registry.queues import PriorityName
from penstock.registry.tensors import Array

__all__ = ["Model", "ModelDependency", "close_client", "model"]

_clients: Final[dict[asyncio.AbstractEventLoop, AsyncClient]] = {}
"""Of the environment's settings. A client serves one event loop at a time."""


@dataclass(frozen=True, slots=True)
class Model:
    """One model, or one version of it, for the time of a request."""

    name: str
    version: str | None
    client: AsyncClient

    async def predict(
        self,
        inputs: Inputs,
        *,
        priority: PriorityName = "normal",
        timeout_s: float | None = 30.0,
        idempotency_key: str | None = None,
    ) -> dict[str, Array]:
        """The outputs by name. inputs: an array or nested lists for each input, with a row for each item.

        Raises as AsyncClient.submit and AsyncJobHandle.result do. A job without an idempotency key is cancelled when
        the time is up, and when the request ends before it.
        """
        job = await self.submit(inputs, priority=priority, idempotency_key=idempotency_key)
        try:
            return await job.result(timeout_s)
        except (TimeoutError, asyncio.CancelledError):
            if idempotency_key is None:
                with suppress(PenstockError):
                    await job.cancel()
            raise

    async def submit(
        self,
        inputs: Inputs,
        *,
        priority: PriorityName = "normal",
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
    ) -> AsyncJobHandle:
        """Publishes a job, whose handle tells its id, its events and its outputs. Raises as AsyncClient.submit does."""
        return await self.client.submit(
            self.name,
            inputs,
            version=self.version,
            priority=priority,
            deadline_s=deadline_s,
            idempotency_key=idempotency_key,
        )


@dataclass(frozen=True, slots=True)
class ModelDependency:
    """What gives a route its model. Those of the same arguments are equal, so that tests can override one by value."""

    name: str
    version: str | None = None
    client: AsyncClient | None = None

    async def __call__(self) -> Model:
        """The model, with a client of the running loop."""
        return Model(self.name, self.version, self.client or await _loop_client())


def model(name: str, version: str | None = None, *, client: AsyncClient | None = None) -> ModelDependency:
    """The dependency on a model. version: None for the active one. client: None for one of the environment's settings.

    FastAPI: `async def embed(minilm: Annotated[Model, Depends(model("minilm"))])`. Raises nothing here; an unknown
    model is found by its first job.
    """
    return ModelDependency(name, version, client)


async def close_client() -> None:
    """Closes the client of the running loop, if a route has used one."""
    client = _clients.pop(asyncio.get_running_loop(), None)
    if client is not None:
        await client.aclose()


async def _loop_client() -> AsyncClient:
    loop = asyncio.get_running_loop()
    client = _clients.get(loop)
    if client is None:
        client = _clients[loop] = AsyncClient.from_env()
        await _close_ended()
    return client


async def _close_ended() -> None:
    """Closes the clients of loops that have ended without `close_client`, as those of a test for each request."""
    for loop in [*_clients]:
        if loop.is_closed() and (ended := _clients.pop(loop, None)) is not None:
            await ended.aclose()
