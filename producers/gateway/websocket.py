"""Many requests on one connection: WebSocket /predict/stream. websocket_messages.py has the forms of the messages.

    frame -> request -> a task: submit, follow -> messages of its events, outputs or error
    the client closes, or reads too slowly     -> jobs without an idempotency key are cancelled
    the gateway stops -> streams end, other requests are answered -> close 1012; clients come back with job and after

Close codes: 1000 Timeout without traffic, 1008 too many messages or the end of the API key, 1009 too long, 1011 a
mistake of the gateway, 1012, 1013 too many streams.
A connection has a bounded number of open requests, and waits with its next message until its client takes the last one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, NamedTuple, TypeAlias

from penstock.producers.async_client import AsyncJobHandle
from penstock.producers.events import JobEvent
from penstock.producers.gateway.event_stream import StreamPlaces
from penstock.producers.gateway.exchange import JSON, ClientGone, Exchange, Limits, Receive, RequestRefused, Scope, Send
from penstock.producers.gateway.figures import GatewayFigures
from penstock.producers.gateway.flat_rows import flat_rows, named_model, only_input
from penstock.producers.gateway.problems import PROBLEM_JSON, as_problem_json, problem_of
from penstock.producers.gateway.revocations import REVOKED
from penstock.producers.gateway.tensors import Document, read_inputs, write_outputs
from penstock.producers.gateway.waiting import JobRequest, Jobs
from penstock.producers.gateway.web_pages import WebPages
from penstock.producers.gateway.websocket_messages import (
    Ask,
    Cancel,
    Follow,
    RequestId,
    Written,
    asked,
    id_of,
    request_of,
    written,
    written_event,
    written_problem,
)
from penstock.registry.codecs import Codec
from penstock.registry.errors import ClientUnusable, InvalidInput, JobFailed, PenstockError, QueueFull, UnknownModel
from penstock.registry.package import ModelSpec
from penstock.registry.settings_sections import ServerConfig

__all__ = ["WebSockets"]

Enter: TypeAlias = Callable[[Exchange], Awaitable[object]]
_PATH: Final = "/predict/stream"
_RETRY_S: Final = 1
logger = logging.getLogger("penstock.server")


class End(NamedTuple):
    """How the gateway ends a connection: close code and reason."""

    code: int
    reason: str


_IDLE: Final = End(1000, "Timeout")
_TOO_SLOW: Final = End(1008, "Too slow")
"""The connection is given up without a message, since its client takes none."""
_REVOKED: Final = End(1008, REVOKED)
_FULL: Final = 1013
_FAILED: Final = End(1011, "The gateway failed")
_STOPPING: Final = End(1012, f"The gateway stops. Expected a new connection in {_RETRY_S} s")


class WebSockets:
    """The connections of one process. enter: admits the present task for the caller of a handshake, or raises."""

    def __init__(
        self,
        jobs: Jobs,
        limits: Limits,
        server: ServerConfig,
        figures: GatewayFigures,
        pages: WebPages,
        places: StreamPlaces,
        enter: Enter,
    ) -> None:
        self._enter = enter
        self._pages = pages
        self._places = places
        self._jobs = jobs
        self._limits = limits
        self._server = server
        self._figures = figures
        self._open: set[_Connection] = set()
        self._is_stopping = False

    def stop(self) -> None:
        """Ends all connections, and refuses each new one."""
        self._is_stopping = True
        for connection in self._open:
            connection.end(_STOPPING)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One connection, from its handshake to its end."""
        await receive()
        # The scope itself: its query loses the key, and the server logs it.
        scope["method"] = "GET"
        handshake = Exchange(scope, receive, send, self._limits)
        try:
            model = self._admit(handshake)
            await self._enter(handshake)
        except Exception as error:
            await _refuse(error, scope, send)
            return
        try:
            with self._places.place():
                await send({"type": "websocket.accept"})
                await self._run(handshake, model, receive, send)
        except QueueFull as full:
            # Pages of a browser see no status of a refused handshake, but the code of a close.
            await send({"type": "websocket.accept"})
            await send({"type": "websocket.close", "code": _FULL, "reason": str(full)})

    async def _run(self, handshake: Exchange, model: str | None, receive: Receive, send: Send) -> None:
        """An accepted connection, to its end."""
        enter = partial(self._enter, handshake)
        asked = _Defaults(model, handshake.header(b"traceparent"))
        connection = _Connection(receive, send, self._jobs, asked, self._limits, self._server, self._figures, enter)
        self._open.add(connection)
        end_watch = handshake.entry.on_revoked(lambda: connection.end(_REVOKED))
        try:
            await connection.run()
        finally:
            end_watch()
            self._open.discard(connection)

    def _admit(self, handshake: Exchange) -> str | None:
        """The model that the query names. Raises RequestRefused, InvalidInput and ClientUnusable."""
        if handshake.path != _PATH:
            raise RequestRefused(404, f"There is no such WebSocket. Expected {_PATH}")
        if self._is_stopping:
            raise ClientUnusable("This process stops")
        self._pages.check_origin(handshake, is_websocket=True)
        return handshake.query().get("model")


@dataclass(slots=True, eq=False)
class _Request:
    """An open request of a connection. about: see waiting.Requester."""

    id: RequestId
    kind: bytes
    about: list[tuple[bytes, bytes]] = field(default_factory=list)
    handle: AsyncJobHandle | None = None
    is_cancelled: bool = False
    ends_with_gateway: bool = False
    """Whether it ends at once when the gateway stops, since its client can go on elsewhere."""

    def watch(self) -> AbstractContextManager[None]:
        """The connection cancels the tasks of its requests."""
        return nullcontext()

    @property
    def facts(self) -> dict[str, Any]:
        """What each message about it repeats."""
        return {} if self.id is None else {"id": self.id}

    async def cancel(self) -> None:
        """Cancels its job, now or once it is submitted."""
        self.is_cancelled = True
        if self.handle is not None:
            await self.handle.cancel()


class _Defaults(NamedTuple):
    """What the handshake says for requests that do not."""

    model: str | None
    traceparent: str


class _Connection:
    """One accepted WebSocket. defaults: of requests that do not say. enter: admits the present task, or raises."""

    def __init__(
        self,
        receive: Receive,
        send: Send,
        jobs: Jobs,
        defaults: _Defaults,
        limits: Limits,
        server: ServerConfig,
        figures: GatewayFigures,
        enter: Callable[[], Awaitable[object]],
    ) -> None:
        self._enter = enter
        self._receive = receive
        self._send = send
        self._jobs = jobs
        self._defaults = defaults
        self._timeout_s = limits.client_timeout_s
        self._server = server
        self._figures = figures
        self._now = asyncio.get_running_loop().time
        self._writing = asyncio.Lock()
        self._requests: dict[asyncio.Task[None], _Request] = {}
        self._last_s = self._now()
        """When a message came last, or a request ended."""
        self._rate = _Rate(server.websocket_messages_per_s)
        self._reader: asyncio.Task[Any] | None = None
        self._end: End | None = None

    async def run(self) -> None:
        """Serves until the client or the gateway closes."""
        self._reader = asyncio.current_task()
        try:
            end = await self._read()
            if end is _STOPPING:
                self._cancel_requests(only_streams=True)
                if self._requests:
                    await asyncio.wait([*self._requests])
            if end is not None:
                self._cancel_requests()
                with suppress(OSError, TimeoutError):
                    await self._close(end)
        finally:
            # The client has gone, or the server ends this task.
            self._cancel_requests()

    def end(self, end: End) -> None:
        """Stops reading, and closes with this code."""
        if self._reader is not None and self._end is None:
            self._end = end
            self._reader.cancel()

    async def _read(self) -> End | None:
        """Takes messages; how the connection is to be ended, or None: the client has gone."""
        try:
            while True:
                try:
                    async with asyncio.timeout_at(self._last_s + self._server.websocket_idle_s):
                        message = await self._receive()
                except TimeoutError:
                    if self._requests:
                        self._last_s = self._now()
                    elif self._now() >= self._last_s + self._server.websocket_idle_s:
                        return _IDLE
                    continue
                if message["type"] == "websocket.disconnect":
                    return None
                self._last_s = self._now()
                if not self._rate.takes(self._last_s):
                    most = self._server.websocket_messages_per_s
                    return End(1008, f"Too many messages. Expected at most {most} in a second")
                await self._take(message)
        except (ClientGone, OSError, TimeoutError):
            return None
        except asyncio.CancelledError:
            if self._end is None or self._reader is None:
                raise
            self._reader.uncancel()
            return None if self._end is _TOO_SLOW else self._end
        finally:
            # From now on `end` changes nothing.
            self._reader = None

    async def _take(self, message: Mapping[str, Any]) -> None:
        """Begins a request, or answers with the reason why not."""
        kind, request_id = JSON, None
        try:
            document, kind = asked(message)
            request_id = id_of(document)
            request = request_of(document)
            if isinstance(request, Cancel):
                await self._open_request(request.cancel).cancel()
                return
            self._check_place(request.id)
        except PenstockError as error:
            facts = {} if request_id is None else {"id": request_id}
            await self._write(written_problem(facts, problem_of(error), kind))
            return
        opened = _Request(request.id, kind)
        task = asyncio.get_running_loop().create_task(self._serve(request, document, opened))
        self._requests[task] = opened
        task.add_done_callback(self._forget)

    def _check_place(self, request_id: RequestId) -> None:
        most = self._server.websocket_requests
        if len(self._requests) >= most:
            raise QueueFull(f"{most} requests of this connection are open. Expected a retry after the next end", 1)
        if request_id is not None and any(each.id == request_id for each in self._requests.values()):
            raise InvalidInput("An open request has this id. Expected another one, or none")

    def _open_request(self, request_id: RequestId) -> _Request:
        for request in self._requests.values():
            if request.id == request_id:
                return request
        raise InvalidInput("No open request has this id. Expected that of a request without an end")

    async def _serve(self, request: Ask | Follow, document: Document, opened: _Request) -> None:
        """One request, to its last message."""
        begun, status = self._now(), 200
        try:
            # Each request counts, and a key may have been revoked since the handshake.
            await self._enter()
            if isinstance(request, Follow):
                await self._follow(request, opened)
            else:
                await self._ask(request, document, opened)
        except asyncio.CancelledError:
            status = 499
            raise
        except Exception as error:  # the last place where an error can become a message
            status = await self._told(error, opened)
        finally:
            self._figures.count(_PATH, "WEBSOCKET", status, self._now() - begun)

    async def _told(self, error: Exception, opened: _Request) -> int:
        """Writes what has ended the request, unless the client has gone. Returns the status of its end."""
        # A broker that is away is an OSError, too: its client is there, and is told.
        if isinstance(error, ClientGone) or (isinstance(error, OSError) and not isinstance(error, PenstockError)):
            return 499
        problem = problem_of(error)
        if problem.status == 500:
            logger.error("request failed", exc_info=error, extra={"route": _PATH})
            self.end(_FAILED)
        with suppress(ClientGone, OSError):
            await self._write(written_problem(_about(opened), problem, opened.kind))
        return problem.status

    async def _ask(self, request: Ask, document: Document, opened: _Request) -> None:
        begun = self._now()
        client = self._jobs.client
        spec = await client.spec_of(await named_model(client, request.model or self._defaults.model), request.version)
        is_flat = isinstance(request.inputs, list)
        job = _job_of(request, spec, document, self._defaults.traceparent, is_flat=is_flat)
        is_stream = request.stream if request.stream is not None else spec.streams and not is_flat
        async with self._jobs.following(job, opened) as handle:
            opened.handle = handle
            if opened.is_cancelled:
                await handle.cancel()
            if is_stream:
                await self._send_events(handle, 0, spec.codecs.default, opened)
                return
            info = await handle.info(self._jobs.wait_s + (job.deadline_s or 0))
        outputs = await handle.result()
        facts = {**_about(opened), "type": "completed"}
        if is_flat:
            (values, *_) = (each.tolist() for each in outputs.values())
            latency_ms = round((self._now() - begun) * 1000, 3)
            flat = {"predictions": values[0], "model_version": info.version, "latency_ms": latency_ms}
            await self._write(written({**facts, **flat}, opened.kind))
            return
        facts |= {"model": spec.name, "version": info.version}
        body, _, _ = write_outputs(outputs, spec.codecs.default, facts, opened.kind)
        await self._write(body.decode() if opened.kind == JSON else body)

    async def _follow(self, request: Follow, opened: _Request) -> None:
        handle = self._jobs.client.job(request.job)
        await handle.status()
        opened.handle = handle
        if opened.is_cancelled:
            await handle.cancel()
        codec: Codec = "json"
        # A model that is no longer served has left no wish.
        with suppress(UnknownModel):
            codec = (await self._jobs.client.spec_of(handle.model)).codecs.default
        with self._jobs.waiter(handle.id):
            await self._send_events(handle, request.after, codec, opened)

    async def _send_events(self, handle: AsyncJobHandle, after: int, codec: Codec, opened: _Request) -> None:
        """The events of a job. When the gateway stops, they end, and the job goes on."""
        if self._end is _STOPPING:
            return
        opened.ends_with_gateway = True
        has_told = False
        try:
            async with aclosing(handle.stream(after)) as events:  # type: ignore[type-var]
                async for event in events:
                    has_told = True
                    await self._write(written_event(opened.facts, handle.id, event, codec, opened.kind))
            if not has_told:
                # It has seen the end before. Without an answer it would wait for ever.
                await self._write(
                    written_event(opened.facts, handle.id, await _end_of(handle, after), codec, opened.kind)
                )
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._end is not _STOPPING or task is None:
                raise
            task.uncancel()

    async def _write(self, message: Written) -> None:
        """Sends a message. Raises ClientGone, also for a client that does not take those before it in time."""
        name = "text" if isinstance(message, str) else "bytes"
        async with self._writing:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._send({"type": "websocket.send", name: message})
            except TimeoutError:
                if asyncio.current_task() is not self._reader:
                    self.end(_TOO_SLOW)
                raise ClientGone from None

    async def _close(self, end: End) -> None:
        async with asyncio.timeout(self._timeout_s):
            await self._send({"type": "websocket.close", "code": end.code, "reason": end.reason})

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._requests.pop(task, None)
        self._last_s = self._now()

    def _cancel_requests(self, *, only_streams: bool = False) -> None:
        for task, request in self._requests.items():
            if request.ends_with_gateway or not only_streams:
                task.cancel()


class _Rate:
    """Messages of a connection: so many at once, and so many in each second."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._left = float(most)
        self._at: float | None = None

    def takes(self, now: float) -> bool:
        """Whether one more message is within the rate."""
        passed_s = 0.0 if self._at is None else now - self._at
        self._left, self._at = min(self._most, self._left + passed_s * self._most), now
        if self._left < 1:
            return False
        self._left -= 1
        return True


async def _end_of(handle: AsyncJobHandle, seq: int) -> JobEvent:
    """The last event of an ended job, with this number."""
    info = await handle.info()
    try:
        return JobEvent(seq, info.status, await handle.result())
    except JobFailed as failure:
        return JobEvent(seq, info.status, failure)


def _job_of(request: Ask, spec: ModelSpec, document: Document, traceparent: str, *, is_flat: bool) -> JobRequest:
    """The job of a request. traceparent: of a request that has none. Raises InvalidInput."""
    if request.inputs is None:
        expected = ", ".join(tensor.name for tensor in spec.inputs)
        raise InvalidInput(f"Missing inputs. Expected an object with: {expected}, or one row of numbers")
    if request.timeout_ms is not None and not request.timeout_ms > 0:
        raise InvalidInput(f"timeout_ms is {request.timeout_ms:g}. Expected a positive number of milliseconds")
    if is_flat:
        rows = flat_rows([_numbers(request.inputs)])
        inputs: dict[str, object] = {only_input(spec, rows): rows}
    else:
        inputs = read_inputs(spec, document)
    return JobRequest(
        spec.name,
        inputs,
        version=request.version,
        outputs=tuple(request.outputs),
        priority=request.priority,
        deadline_s=None if request.timeout_ms is None else request.timeout_ms / 1000,
        idempotency_key=request.idempotency_key,
        traceparent=request.traceparent or traceparent,
    )


def _numbers(row: list[Any]) -> list[float]:
    try:
        if all(type(number) in (int, float) for number in row):
            return [float(number) for number in row]
    except OverflowError:
        pass
    raise InvalidInput("inputs has something else than numbers. Expected one row of numbers")


def _about(opened: _Request) -> dict[str, Any]:
    """The id of a request, and of its job."""
    return opened.facts if opened.handle is None else {**opened.facts, "job_id": opened.handle.id}


async def _refuse(error: Exception, scope: Scope, send: Send) -> None:
    """Answers a handshake with an HTTP status, where the server can do it."""
    problem = problem_of(error)
    if problem.status == 500:
        logger.error("request failed", exc_info=error, extra={"route": _PATH})
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008, "reason": problem.title})
        return
    body = as_problem_json(problem)
    headers = [(b"content-type", PROBLEM_JSON), (b"content-length", b"%d" % len(body)), *problem.headers]
    await send({"type": "websocket.http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})
