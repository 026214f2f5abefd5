"""The ASGI application: the table of routes, and what every request has in common.

request -> Exchange -> Routes.find -> Access.enter -> handler -> answer
                           `-> any error -> problems.py -> the error's shape of that route
WebSocket -> websocket.py
startup -> GatewayClient; SIGTERM -> streams end with a retry hint, waiting requests are answered; shutdown -> closed
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import lru_cache
from ipaddress import ip_address
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

from penstock.producers.gateway.batches.opening import open_store
from penstock.producers.gateway.callers import Access, Entry, Needs
from penstock.producers.gateway.event_stream import EventStreams, StreamPlaces
from penstock.producers.gateway.exchange import CallerRevoked, ClientGone, Exchange, Limits, Receive, Scope, Send
from penstock.producers.gateway.figures import GatewayFigures
from penstock.producers.gateway.fleet import GatewayClient
from penstock.producers.gateway.health import HealthRoutes
from penstock.producers.gateway.jobs import JobRoutes
from penstock.producers.gateway.key_copy import KeyCopy
from penstock.producers.gateway.limits import RateLimits
from penstock.producers.gateway.model_control import ModelControlRoutes
from penstock.producers.gateway.models import ModelRoutes
from penstock.producers.gateway.oip import OipRoutes
from penstock.producers.gateway.openai import OpenAiRoutes
from penstock.producers.gateway.openai_batches import BatchEndpoint, BatchRoutes
from penstock.producers.gateway.openai_chat import ChatRoutes
from penstock.producers.gateway.openai_completions import CompletionRoutes
from penstock.producers.gateway.openai_files import FileRoutes
from penstock.producers.gateway.openai_responses import ResponseRoutes
from penstock.producers.gateway.openai_texts import OpenAiTexts
from penstock.producers.gateway.openapi import DocumentRoutes
from penstock.producers.gateway.predict import PredictRoutes
from penstock.producers.gateway.problems import problem_of
from penstock.producers.gateway.request_headers import check_grammar
from penstock.producers.gateway.routing import Route, Routes
from penstock.producers.gateway.rpc.binding import RpcBinding
from penstock.producers.gateway.text_jobs import TextJobs
from penstock.producers.gateway.token_counts import PackageTokenizers
from penstock.producers.gateway.waiting import Jobs
from penstock.producers.gateway.web_pages import WebPages
from penstock.producers.gateway.websocket import WebSockets
from penstock.registry import garbage
from penstock.registry.api_keys import ApiKey
from penstock.registry.bearer_file import presents, read_bearer
from penstock.registry.errors import PenstockError
from penstock.registry.open_telemetry import exported_metrics, exported_spans, tracer_of
from penstock.registry.settings import Settings
from penstock.registry.settings_sections import OpenTelemetryConfig

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from penstock.producers.gateway.rpc.server import RpcServer
    from penstock.producers.gateway.server_spans import ServerSpans

__all__ = ["Gateway"]

_MIB: Final = 1024 * 1024
_SERVICE: Final = "penstock-gateway"
logger = logging.getLogger("penstock.server")
_Handler = Callable[[int, FrameType | None], Any]


class Gateway:
    """An ASGI application. settings: None means those of the environment, read at startup.

    It may be mounted in another ASGI application, which need not run its lifespan, and calls `aclose`. heartbeat_s: the
    longest silence of an event stream. rpc: where gRPC listens from startup to shutdown; None: nowhere.
    owns_process: whether the process serves nothing else, so that its garbage collector may be told what stays.
    exports_spans: False in a program, which decides where the spans of its process go.
    """

    def __init__(
        self,
        settings: Settings | None = None,
        *,
        heartbeat_s: float = 15.0,
        rpc: RpcBinding | None = None,
        owns_process: bool = False,
        exports_spans: bool = True,
    ) -> None:
        self._settings = settings
        self._heartbeat_s = heartbeat_s
        self._rpc = rpc
        self._owns_process = owns_process
        self._exports_spans = exports_spans
        self._parts: _Parts | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._unchain: Callable[[], None] | None = None
        self.start_error = ""
        """Why the startup failed; empty while it has not."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        kind = scope["type"]
        if kind == "http":
            if self._parts is None:
                self._open()
            await self._serve(scope, receive, send)
        elif kind == "lifespan":
            await self._live(receive, send)
        elif kind == "websocket":
            parts = self._parts or self._open()
            await parts.websockets.serve(scope, receive, send)

    async def aclose(self) -> None:
        """Ends open streams and disconnects. A later request connects again."""
        parts, self._parts = self._parts, None
        if parts is not None:
            self._leave_process()
            parts.stop()
            await parts.aclose()

    def stop_soon(self) -> None:
        """Ends open streams with a hint to come again. For any thread.

        A server says that it stops when the last request has ended. A stream has no end of its own.
        """
        # A loop that has ended has no streams.
        if (loop := self._loop) is not None and not loop.is_closed():
            loop.call_soon_threadsafe(self._stop)

    def read_keys_again(self) -> None:
        """The next request sees the API keys that were made until now. For any thread."""
        if (loop := self._loop) is not None:
            loop.call_soon_threadsafe(self._expire_keys)

    def _stop(self) -> None:
        if self._parts is not None:
            self._parts.stop()

    def _expire_keys(self) -> None:
        if self._parts is not None:
            self._parts.keys.expire()

    def _open(self) -> _Parts:
        """Connects. Raises ConfigurationError. A broker that is away is met by the first request."""
        self._parts = _Parts(self._settings or Settings.load(), self._heartbeat_s)
        self._parts.batches.start()
        self._loop = asyncio.get_running_loop()
        # A server closes a mounted application, too, when the last request has ended.
        self._unchain = _chain_signals(self.stop_soon)
        return self._parts

    def _leave_process(self) -> None:
        self._loop = None
        if self._unchain is not None:
            self._unchain()
            self._unchain = None

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        parts = self._parts or self._open()
        exchange = Exchange(scope, receive, send, parts.limits)
        route: Route | None = None
        span: Span | None = None
        error_type = ""
        now = asyncio.get_running_loop().time
        begun = now()
        # A server may begin a request in the context of the one before it.
        parts.access.leave()
        try:
            route, exchange.words = parts.routes.find(exchange.method, exchange.path)
            if (right := route.right) != "nothing" and not parts.is_scrape(exchange, route):
                if parts.spans is not None:
                    span = parts.spans.begin_request(exchange, route.path)
                exchange.entry = await parts.enter(exchange, right, route.path)
            await route.handler(exchange)
        except CallerRevoked as error:
            await _end_revoked(error, route, exchange)
        except ClientGone:
            # A number that servers use for it, in their logs only.
            exchange.status = 499
        except asyncio.CancelledError:
            # The server stops, or the application around this one has given the request up.
            exchange.status = 499
            raise
        except Exception as error:  # the last place where an error can become an answer
            # Its head tells nothing of it.
            error_type = type(error).__name__ if exchange.has_begun else ""
            await _answer(error, parts.routes, route, exchange)
        finally:
            parts.access.leave()
            parts.figures.count(route.path if route else "", exchange.method, exchange.status, now() - begun)
            if span is not None and parts.spans is not None:
                parts.spans.end_request(span, exchange.status, error_type)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        try:
            parts = self._open()
            exports = parts.export(spans=self._exports_spans)
            await parts.listen(self._rpc)
            if self._owns_process:
                garbage.freeze()
        except PenstockError as error:
            self._leave_process()
            self.start_error = str(error)
            await send({"type": "lifespan.startup.failed", "message": self.start_error})
            return
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.aclose()
        # The collector of OpenTelemetry may be slow.
        await asyncio.to_thread(exports.close)
        await send({"type": "lifespan.shutdown.complete"})


class _Parts:
    """What one process serves with."""

    def __init__(self, settings: Settings, heartbeat_s: float) -> None:
        inference = settings.inference
        server = inference.server
        self._config = server
        self.limits = Limits(inference.max_request_size_mb * _MIB, server.client_timeout_s)
        # A job that the shared cache answered in this process would have an id that no other gateway knows.
        self.client = GatewayClient.from_env(settings=settings.changed({"cache.producer_lookup": False}))
        limits = RateLimits(inference.safeguards.rate_limit, self.client.spend)
        self.figures = GatewayFigures()
        self._open_telemetry = inference.open_telemetry
        self.spans = _server_spans(inference.open_telemetry)
        self.keys = KeyCopy(_RegisteredKeys(settings.registry_url).since)
        self.access = Access(settings, self.keys, limits, count=self.figures.count_key)
        self._metrics_token = read_bearer(settings.worker.metrics_bearer_file)
        self.address_header = server.address_header.encode("ascii")
        self.jobs = Jobs(self.client, server.max_waiting, inference.timeout_seconds, self.show_open)
        self.places = StreamPlaces(server.max_streams, self.show_open)
        self.streams = EventStreams(self.places, heartbeat_s=heartbeat_s)
        self.rpc: RpcServer | None = None
        self.pages = pages = WebPages(server)
        self.websockets = WebSockets(
            self.jobs, self.limits, server, self.figures, pages, self.places, self._enter_websocket
        )
        self.health = health = HealthRoutes(self.client, self.figures, has_metrics=server.metrics)
        tokenizers = PackageTokenizers(inference.repo_root)
        store, predict, openai = open_store(settings), PredictRoutes(self.jobs), OpenAiRoutes(self.jobs, tokenizers)
        texts = OpenAiTexts(TextJobs(self.jobs, self.streams), tokenizers)
        chats, completions = ChatRoutes(self.client, texts), CompletionRoutes(self.client, texts)
        self.batches = BatchRoutes(
            store,
            self.client,
            (
                BatchEndpoint("/v1/embeddings", openai.prepare_line),
                BatchEndpoint("/v1/chat/completions", chats.prepare_line),
                BatchEndpoint("/v1/completions", completions.prepare_line),
                BatchEndpoint("/v1/models/{name}:predict", predict.prepare_line),
                BatchEndpoint("/v1/models/{name}/versions/{version}:predict", predict.prepare_line),
            ),
            resume=self.access.resume,
            max_outstanding=inference.batches.max_outstanding,
            max_line_bytes=self.limits.max_bytes,
        )
        control = ModelControlRoutes(self.client, settings)
        groups = (
            JobRoutes(self.jobs, self.streams),
            predict,
            ModelRoutes(self.client, control),
            openai,
            FileRoutes(store, self.client, inference.batches.max_file_mb * _MIB),
            self.batches,
            control,
            completions,
            chats,
            ResponseRoutes(self.jobs, self.streams),
            OipRoutes(self.jobs, health),
            health,
        )
        routes = [route for group in groups for route in group.routes]
        self.routes = Routes([*routes, *DocumentRoutes(routes).routes])

    def show_open(self) -> None:
        """Brings the figures of open requests up to date."""
        self.figures.set_open(self.jobs.waiting, self.places.taken)

    def is_scrape(self, exchange: Exchange, route: Route) -> bool:
        """Whether a request has the token of those who read metrics. It opens that page, and no other route."""
        return route.handler == self.health.show_metrics and presents(
            exchange.credentials.authorization, self._metrics_token
        )

    async def enter(self, exchange: Exchange, right: Needs, route: str) -> Entry:
        """Admits the present task for the caller of a request. Raises as Access, WebPages and check_grammar do."""
        self.pages.check_origin(exchange)
        if exchange.method != "GET":
            check_grammar(exchange)
        address, is_remote = _address(exchange, self.address_header), _is_remote(exchange.scope)
        entry = await self.access.enter(exchange.credentials, right, address, route, is_remote=is_remote)
        if not entry.caller.key_id:
            self.pages.check_host(exchange, is_exposed=is_remote or self._config.is_exposed)
        return entry

    async def _enter_websocket(self, handshake: Exchange) -> None:
        handshake.entry = await self.enter(handshake, "submit", handshake.path)

    async def listen(self, binding: RpcBinding | None) -> None:
        """Serves gRPC, too. Raises ConfigurationError."""
        if binding is not None:
            # Servers of other people's choice run without the packages of gRPC.
            from penstock.producers.gateway.rpc.server import RpcServer

            self.rpc = RpcServer(binding, self.jobs, self.health, self.figures, self.access, self._config, self.spans)
            await self.rpc.start(self.limits.max_bytes)

    def export(self, *, spans: bool) -> ExitStack:
        """Sends spans and metrics to the collector of the settings until it is closed. Raises ConfigurationError.

        A gateway that is mounted has no lifespan: the other application decides where its spans go.
        """
        exports, config = ExitStack(), self._open_telemetry
        instance = f"{socket.gethostname()}:{os.getpid()}"
        if spans:
            exports.enter_context(exported_spans(config, _SERVICE, instance))
        collector = self.figures.collector
        exports.enter_context(exported_metrics(config, collector, self.show_open, _SERVICE, instance))
        return exports

    def stop(self) -> None:
        """The process ends: open streams end now, waiting requests with their jobs."""
        self.streams.stop()
        self.websockets.stop()
        if self.rpc is not None:
            self.rpc.stop()

    async def aclose(self) -> None:
        """Waits for calls that still run and for jobs that are being cancelled, and disconnects."""
        await self.batches.aclose()
        if self.rpc is not None:
            await self.rpc.aclose()
        await self.jobs.aclose()
        await self.access.aclose()
        await self.client.aclose()


def _server_spans(config: OpenTelemetryConfig) -> ServerSpans | None:
    if not config.traces:
        return None
    tracer = tracer_of()
    # It imports the package, of whose absence `tracer_of` tells.
    from penstock.producers.gateway.server_spans import ServerSpans

    return ServerSpans(tracer)


class _RegisteredKeys:
    """The keys in the registry's database. The database's library is loaded at the first read, in its thread."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._since: Callable[[int], list[ApiKey]] | None = None

    def since(self, revision: int) -> list[ApiKey]:
        """See SqlApiKeys.since."""
        if self._since is None:
            from penstock.registry.catalog.api_keys import SqlApiKeys

            self._since = SqlApiKeys(self._url).since
        return self._since(revision)


def _address(exchange: Exchange, header: bytes) -> str:
    """The address of the caller: the last one in the header of a trusted proxy, or that of the connection."""
    if header:
        return exchange.header(header).rpartition(",")[2].strip()[:64]
    client = exchange.scope.get("client")
    return client[0] if client else "local"


def _is_remote(scope: Scope) -> bool:
    """Whether the connection came to another address of this machine than the loopback."""
    server = scope.get("server")
    return server is not None and not _is_local(server[0])


@lru_cache(maxsize=64)
def _is_local(host: str) -> bool:
    """Whether an address of this machine is of the loopback, or none at all."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        # A name, or the path of a socket in the file system.
        return True


async def _answer(error: Exception, routes: Routes, route: Route | None, exchange: Exchange) -> None:
    problem = problem_of(error)
    if problem.status == 500 or exchange.has_begun:
        logger.error("request failed", exc_info=error, extra={"route": route.path if route else ""})
    if exchange.has_begun:
        # Half an answer was sent. The server closes the connection, so that nobody takes it for a whole one.
        return
    write = routes.error_of(exchange.path) if route is None else route.error
    body, kind = write(problem)
    if problem.status == 429:
        # The problem has the limits as they are now.
        exchange.entry.readings = ()
    await exchange.answer(problem.status, body, kind, problem.headers)


async def _end_revoked(error: CallerRevoked, route: Route | None, exchange: Exchange) -> None:
    """Refuses a request that waited; a stream, which has begun, ends."""
    if not exchange.has_begun and route is not None:
        problem = problem_of(error)
        await exchange.answer(problem.status, *route.error(problem), problem.headers)
        return
    # A client that takes nothing is disconnected by the server.
    with suppress(OSError, TimeoutError):
        await exchange.end_stream()


def _chain_signals(on_stop: Callable[[], object]) -> Callable[[], None]:
    """Calls `on_stop` before the server's own handlers; returns what undoes it."""
    if threading.current_thread() is not threading.main_thread():
        return lambda: None
    before: dict[int, Any] = {}

    def handle(number: int, frame: FrameType | None) -> None:
        on_stop()
        if callable(earlier := before[number]):
            earlier(number, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        if callable(signal.getsignal(number)):
            before[number] = signal.signal(number, handle)

    def undo() -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        for number, earlier in before.items():
            # A handler that came later still calls this one.
            if signal.getsignal(number) is handle:
                signal.signal(number, earlier)

    return undo
