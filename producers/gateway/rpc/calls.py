"""One gRPC call and its end: its metadata, the time that it has, and how it is counted.

    bytes -> message -> Call -> method -> answer, trailing metadata
                                  `-> any error -> status.py

A client that cancels its call, or whose deadline passes, ends the task of the method: grpc.aio cancels it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar
from urllib.parse import unquote

import grpc

from penstock.producers.gateway.callers import NOBODY, Entry
from penstock.producers.gateway.figures import GatewayFigures
from penstock.producers.gateway.request_headers import checked_key
from penstock.producers.gateway.rpc.messages import parsed
from penstock.producers.gateway.rpc.status import Status, status_of
from penstock.producers.gateway.rpc.turns import Turns

if TYPE_CHECKING:
    from penstock.producers.gateway.server_spans import ServerSpans

__all__ = ["Call", "Calls", "Enter", "Method"]

Answer = TypeVar("Answer")

logger = logging.getLogger("penstock.server")
_UNWATCHED: Final = nullcontext()


class Call:
    """One call. about: what its trailing metadata tells about its job, as HTTP's headers do. entry: of its caller.
    traceparent: the trace context for its jobs; empty: they have no trace."""

    __slots__ = ("_context", "_metadata", "about", "entry", "traceparent")

    def __init__(self, context: Any) -> None:
        self.about: list[tuple[bytes, bytes]] = []
        self.entry = Entry(NOBODY)
        self._context = context
        self._metadata: Mapping[str, Any] | None = None
        self.traceparent = self.metadata("traceparent")

    def metadata(self, name: str) -> str:
        """The value of a name in lower case; empty without one."""
        value: str = self._pairs().get(name, "")
        return value

    @property
    def address(self) -> str:
        """The address of the client, without its port."""
        # ipv4:127.0.0.1:5000, ipv6:%5B::1%5D:5000
        text: str = unquote(self._context.peer()).partition(":")[2]
        return text.rpartition(":")[0].strip("[]") or "local"

    def idempotency_key(self) -> str | None:
        """The key of `idempotency-key`; None without one. Raises RequestRefused."""
        text = self._pairs().get("idempotency-key")
        return None if text is None else checked_key(text)

    def deadline_s(self, wanted_s: float | None) -> float | None:
        """The shorter one of a time-out that the request names and the time that the call has left; None: no end."""
        left_s: float | None = self._context.time_remaining()
        if left_s is None:
            return wanted_s
        # A call that is late is cancelled already, and its job ends as one that is.
        return max(left_s, 0.001) if wanted_s is None else min(wanted_s, max(left_s, 0.001))

    def _pairs(self) -> Mapping[str, Any]:
        if self._metadata is None:
            self._metadata = dict(self._context.invocation_metadata() or ())
        return self._metadata

    def watch(self) -> AbstractContextManager[None]:
        """grpc.aio ends the task when the client has gone."""
        return _UNWATCHED


Method: TypeAlias = Callable[[Call, Any], Awaitable[Any]]
"""(call, request) -> answer."""
Enter: TypeAlias = Callable[[Call, str], Awaitable[None]]
"""(call, /service/method): admits the present task for the caller, or raises; see callers.py."""


class Calls:
    """The calls of one process. enter: admits a call, and each request of a stream. spans: of calls; None: none."""

    def __init__(self, figures: GatewayFigures, enter: Enter, spans: ServerSpans | None = None) -> None:
        self._figures = figures
        self._spans = spans
        self.enter: Final = enter
        self._turns = Turns()

    def unary(self, name: str, kind: Any, method: Method, model_of: Callable[[Any], str] | None = None) -> Any:
        """The handler of a method with one request of this kind, and one answer. name: /service/method.

        model_of: the model that a request names, if the method submits a job.
        """

        async def serve(data: bytes, context: Any) -> bytes:
            return await self.end(name, context, lambda call: self._answer(call, kind, data, method, model_of))

        # Messages are parsed in `_answer`: what grpc.aio cannot parse it answers as an unknown error.
        return grpc.unary_unary_rpc_method_handler(serve)

    async def end(self, name: str, context: Any, run: Callable[[Call], Awaitable[Answer]]) -> Answer:
        """Runs a call to its end: its answer, or the status of its error; both with trailing metadata, and counted."""
        call = Call(context)
        ended = self._begun(call, name)
        try:
            await self.enter(call, name)
            answer = await run(call)
        except asyncio.CancelledError:
            ended(grpc.StatusCode.CANCELLED)
            raise
        except Exception as error:  # the last place where an error can become a status
            status = self.status_of(name, error)
            ended(status.code, is_error=status.is_mistake)
            await context.abort(status.code, status.details, (*_trailing(call), *status.trailing))
            raise
        ended(grpc.StatusCode.OK)
        if call.about:
            context.set_trailing_metadata(_trailing(call))
        return answer

    def _begun(self, call: Call, name: str) -> Callable[..., None]:
        """Called with the status code, it counts the call and ends its span."""
        spans, now = self._spans, asyncio.get_running_loop().time
        begun, span = now(), None
        if spans is not None:
            span, call.traceparent = spans.begin_call(name, call.traceparent)

        def ended(code: grpc.StatusCode, *, is_error: bool = False) -> None:
            self._figures.count_call(name, code.name, now() - begun)
            if spans is not None and span is not None:
                spans.end_call(span, code.value[0], is_error=is_error)

        return ended

    async def _answer(
        self, call: Call, kind: Any, data: bytes, method: Method, model_of: Callable[[Any], str] | None
    ) -> bytes:
        request = parsed(kind, data)
        if model_of is None:
            answer: bytes = (await method(call, request)).SerializeToString()
            return answer
        model = model_of(request)
        turn = self._turns.begin(model)
        try:
            await turn.pass_through()
            answer = (await method(call, request)).SerializeToString()
        finally:
            self._turns.end(model)
        return answer

    def status_of(self, name: str, error: Exception) -> Status:
        """The status of an error, which is logged if it is a mistake of the gateway."""
        status = status_of(error)
        if status.is_mistake:
            logger.error("call failed", exc_info=error, extra={"method": name})
        return status


def _trailing(call: Call) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode(), value.decode()) for name, value in call.about)
