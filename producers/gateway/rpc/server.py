"""grpc.aio with its services and its bounds.

    start -> the services of one port -> stop: streams end with a hint, no call begins -> aclose: at most the grace

Each process of `penstock serve` has one, in the event loop of its HTTP server.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

import grpc
from grpc_reflection.v1alpha import reflection

from penstock.producers.gateway.callers import Access, Credentials, Needs
from penstock.producers.gateway.figures import GatewayFigures
from penstock.producers.gateway.health import HealthRoutes
from penstock.producers.gateway.rpc import health as health_service
from penstock.producers.gateway.rpc import oip, predict
from penstock.producers.gateway.rpc.binding import RpcBinding
from penstock.producers.gateway.rpc.calls import Call, Calls
from penstock.producers.gateway.rpc.messages import POOL
from penstock.producers.gateway.rpc.streams import Streams
from penstock.producers.gateway.waiting import Jobs
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings_sections import ServerConfig

if TYPE_CHECKING:
    from penstock.producers.gateway.server_spans import ServerSpans

__all__ = ["RpcServer"]

_NEEDS: Final[dict[str, Needs]] = {
    **{f"/{health_service.SERVICE}/{name}": "nothing" for name in ("Check", "Watch")},
    **{f"/{oip.SERVICE}/{name}": "nothing" for name in ("ServerLive", "ServerReady")},
    **{
        f"/{oip.SERVICE}/{name}": "look"
        for name in ("ModelReady", "ServerMetadata", "ModelMetadata", "RepositoryIndex")
    },
}
"""What a method needs, as its REST route does. One that is not here submits jobs."""
_LEAST_PING_MS: Final = 10_000
"""A client that pings an idle connection more often is disconnected."""


class RpcServer:
    """The gRPC server of one process. access: the door of its callers. spans: of its calls; None: they have none."""

    def __init__(
        self,
        binding: RpcBinding,
        jobs: Jobs,
        health: HealthRoutes,
        figures: GatewayFigures,
        access: Access,
        config: ServerConfig,
        spans: ServerSpans | None = None,
    ) -> None:
        self._access = access
        self._binding = binding
        self._jobs = jobs
        self._health = health
        self._config = config
        self._calls = Calls(figures, self._enter, spans)
        self._streams = Streams(self._calls, config.client_timeout_s)
        self._server: Any = None
        self._stopped: asyncio.Task[None] | None = None

    async def start(self, max_bytes: int) -> None:
        """Listens. max_bytes: of one message. Raises ConfigurationError."""
        # Calls that wait for a job are bounded by Jobs; as many again may stream. Watches have a bound of their own.
        most = 2 * self._config.max_waiting + health_service.MOST_WATCHES
        self._server = grpc.aio.server(options=_options(self._config, max_bytes), maximum_concurrent_rpcs=most)
        services: dict[str, _Service] = {
            oip.SERVICE: oip.OipService(self._jobs, self._health, self._calls, self._streams),
            predict.SERVICE: predict.PredictService(self._jobs, self._calls, self._streams),
        }
        checked = health_service.HealthService(list(services), self._health, self._calls, self._streams)
        for name, service in {**services, health_service.SERVICE: checked}.items():
            handler = grpc.method_handlers_generic_handler(name, service.handlers())
            self._server.add_generic_rpc_handlers((handler,))
        names = (*services, health_service.SERVICE, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server, POOL)
        try:
            _listen(self._server, self._binding)
        except RuntimeError:
            raise ConfigurationError(
                f"gRPC cannot listen on {self._binding.address}. Expected a free address, and a PEM certificate and key"
            ) from None
        await self._server.start()

    def stop(self) -> None:
        """Refuses further calls, and ends the streams. Running calls have the grace."""
        if self._server is not None and self._stopped is None:
            self._streams.stop()
            self._stopped = asyncio.get_running_loop().create_task(self._server.stop(self._config.stop_grace_s))

    async def aclose(self) -> None:
        """Waits for the running calls. Those that go on beyond the grace are cancelled, with their jobs."""
        self.stop()
        if self._stopped is not None:
            await self._stopped

    async def _enter(self, call: Call, method: str) -> None:
        """Admits a call. Raises as Access.enter does."""
        needs = _NEEDS.get(method, "submit")
        if needs == "nothing":
            return
        header = self._config.address_header
        address = call.metadata(header).rpartition(",")[2].strip()[:64] if header else call.address
        sent = Credentials(call.metadata("authorization"), call.metadata("x-api-key"))
        call.entry = await self._access.enter(sent, needs, address, method)


class _Service(Protocol):
    def handlers(self) -> dict[str, Any]: ...


def _options(config: ServerConfig, max_bytes: int) -> list[tuple[str, int]]:
    timeout_ms = int(config.client_timeout_s * 1000)
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", max_bytes),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_concurrent_streams", config.max_waiting),
        # A connection that says nothing, before and after its handshake.
        ("grpc.server_handshake_timeout_ms", timeout_ms),
        ("grpc.max_connection_idle_ms", timeout_ms),
        # One whose client has gone without a word.
        ("grpc.keepalive_time_ms", timeout_ms),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_MS),
    ]


def _listen(server: Any, binding: RpcBinding) -> None:
    if binding.certificate is None or binding.key is None:
        server.add_insecure_port(binding.address)
        return
    pair = _read(binding.key), _read(binding.certificate)
    server.add_secure_port(binding.address, grpc.ssl_server_credentials([pair]))


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise ConfigurationError(f"{path} cannot be read: {problem.strerror}. Expected a PEM file") from None
