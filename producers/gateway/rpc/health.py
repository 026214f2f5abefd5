"""The health service of gRPC, `grpc.health.v1.Health`: SERVING while jobs are answered, as /health/ready over HTTP.

Check -> readiness now;  Watch -> the status, and each change of it, until the server stops
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2

from penstock.producers.gateway.exchange import RequestRefused
from penstock.producers.gateway.health import HealthRoutes
from penstock.producers.gateway.rpc.calls import Call, Calls
from penstock.producers.gateway.rpc.messages import parsed
from penstock.producers.gateway.rpc.streams import Streams
from penstock.registry.errors import QueueFull

__all__ = ["MOST_WATCHES", "SERVICE", "HealthService"]

SERVICE: Final = "grpc.health.v1.Health"
_Request: Final[Any] = health_pb2.HealthCheckRequest
_Response: Final[Any] = health_pb2.HealthCheckResponse
_LOOK_S: Final = 1.0
"""Between two looks of those that watch."""
_RETRY_S: Final = 30.0
MOST_WATCHES: Final = 256
"""Of one process: clients without a key may watch, and must not take the places of those that submit jobs."""


class HealthService:
    """The methods of the service. services: the names that are asked for; the empty one is the whole server."""

    def __init__(self, services: Sequence[str], health: HealthRoutes, calls: Calls, streams: Streams) -> None:
        self._services = frozenset(("", *services))
        self._health = health
        self._calls = calls
        self._streams = streams
        self._look: asyncio.Task[int] | None = None
        self._looked_at = 0.0
        self._watches = 0

    def handlers(self) -> dict[str, Any]:
        """The handlers of grpc.aio, by the method's name."""

        async def watch(data: bytes, context: Any) -> None:
            await self._calls.end(f"/{SERVICE}/Watch", context, lambda _: self._watch(data, context))

        return {
            "Check": self._calls.unary(f"/{SERVICE}/Check", _Request, self.check),
            "Watch": grpc.unary_stream_rpc_method_handler(watch),
        }

    async def check(self, _call: Call, request: Any) -> Any:
        """Check."""
        if request.service not in self._services:
            names = ", ".join(sorted(self._services - {""}))
            raise RequestRefused(404, f"There is no such service. Expected one of: {names}")
        return _Response(status=await self._status())

    async def _watch(self, data: bytes, context: Any) -> None:
        if self._watches >= MOST_WATCHES:
            raise QueueFull(f"{MOST_WATCHES} clients watch. Expected a retry after {_RETRY_S:g} s", _RETRY_S)
        self._watches += 1
        try:
            await self._tell_changes(data, context)
        finally:
            self._watches -= 1

    async def _tell_changes(self, data: bytes, context: Any) -> None:
        request, last = parsed(_Request, data), None
        while True:
            is_last = self._streams.stopping.is_set()
            is_known = request.service in self._services
            status = await self._recent_status() if is_known else _Response.SERVICE_UNKNOWN
            if status != last:
                await self._streams.write(context, _Response(status=status).SerializeToString())
                last = status
            if is_last:
                return
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._streams.stopping.wait()

    async def _status(self) -> int:
        is_ready = not self._streams.stopping.is_set() and (await self._health.readiness()).ready
        return int(_Response.SERVING if is_ready else _Response.NOT_SERVING)

    async def _recent_status(self) -> int:
        """One look serves all that watch."""
        loop = asyncio.get_running_loop()
        if self._streams.stopping.is_set():
            return int(_Response.NOT_SERVING)
        if self._look is None or loop.time() - self._looked_at >= _LOOK_S:
            self._look, self._looked_at = loop.create_task(self._status()), loop.time()
        return await asyncio.shield(self._look)
