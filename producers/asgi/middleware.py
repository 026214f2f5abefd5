"""Around an ASGI application: who is admitted, how long it took, and errors of jobs as answers.

request -> is there a place? 503 -> is the caller within the rate? 429 -> application -> Server-Timing
                                                                      `-> a PenstockError -> problem+json

Both refusals have Retry-After. WebSockets and the lifespan pass through. The limits are of this process.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple, TypeAlias

from penstock.producers.gateway.exchange import Message, Receive, RequestRefused, Scope, Send
from penstock.producers.gateway.problems import PROBLEM_JSON, as_problem_json, problem_of
from penstock.registry.errors import ConfigurationError, PenstockError

__all__ = ["ASGIMiddleware", "Application", "client_address"]

Application: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]
_MOST_CALLERS: Final = 10_000
"""Whose rate is remembered. The one that asked longest ago is forgotten first."""
_FULL_RETRY_S: Final = 1


class _Admission(NamedTuple):
    """Whether a request is within the rate. retry_after_s: when the next one will be."""

    is_granted: bool
    retry_after_s: float = 0.0


def client_address(scope: Scope) -> str:
    """The address of the connection; empty where the server tells none. Behind a proxy it is that of the proxy."""
    client = scope.get("client")
    return str(client[0]) if client else ""


class ASGIMiddleware:
    """`app.add_middleware(ASGIMiddleware, max_in_flight=256)`, around any ASGI application.

    max_in_flight: requests at a time; further ones are answered with 503. requests_per_minute: of one caller, with as
    many at once; further ones are answered with 429; None: no rate. caller: what tells callers apart, such as the
    tenant of a key; the address by default. Raises ConfigurationError for a limit below 1.
    """

    def __init__(
        self,
        app: Application,
        *,
        max_in_flight: int = 1024,
        requests_per_minute: int | None = None,
        caller: Callable[[Scope], str] = client_address,
    ) -> None:
        if max_in_flight < 1 or (requests_per_minute is not None and requests_per_minute < 1):
            raise ConfigurationError("A limit of the middleware is below 1. Expected at least 1, or None for no rate")
        self._app = app
        self._max_in_flight = max_in_flight
        self._per_minute = requests_per_minute
        self._caller = caller
        self._in_flight = 0
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """(requests that a caller has left, when that was), by caller."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begun = asyncio.get_running_loop().time()
        refusal = self._refusal(scope, begun)
        if refusal is not None:
            await _answer(refusal, send)
            return
        self._in_flight += 1
        try:
            await self._serve(scope, receive, send, begun)
        finally:
            self._in_flight -= 1

    async def _serve(self, scope: Scope, receive: Receive, send: Send, begun: float) -> None:
        has_begun = False
        now = asyncio.get_running_loop().time

        async def send_timed(message: Message) -> None:
            nonlocal has_begun
            if message["type"] == "http.response.start":
                has_begun = True
                timing = b"app;dur=%.3f" % ((now() - begun) * 1000)
                message = {**message, "headers": [*message.get("headers", ()), (b"server-timing", timing)]}
            await send(message)

        try:
            await self._app(scope, receive, send_timed)
        except PenstockError as error:
            if has_begun:
                raise
            await _answer(error, send_timed)

    def _refusal(self, scope: Scope, now: float) -> RequestRefused | None:
        if self._in_flight >= self._max_in_flight:
            text = f"{self._max_in_flight} requests run in this process. Expected a retry after {_FULL_RETRY_S} s"
            return RequestRefused(503, text, ((b"retry-after", b"%d" % _FULL_RETRY_S),))
        if self._per_minute is None:
            return None
        admission = self._admit(self._caller(scope), self._per_minute, now)
        if admission.is_granted:
            return None
        text = f"Too many requests. Expected at most {self._per_minute} in a minute"
        return RequestRefused(429, text, ((b"retry-after", b"%d" % max(1, math.ceil(admission.retry_after_s))),))

    def _admit(self, caller: str, per_minute: int, now: float) -> _Admission:
        left, since = self._left.pop(caller, (float(per_minute), now))
        left = min(per_minute, left + (now - since) * per_minute / 60)
        is_granted = left >= 1
        self._left[caller] = (left - 1 if is_granted else left, now)
        if len(self._left) > _MOST_CALLERS:
            self._left.popitem(last=False)
        return _Admission(is_granted, 0.0 if is_granted else (1 - left) * 60 / per_minute)


async def _answer(error: Exception, send: Send) -> None:
    problem = problem_of(error)
    body = as_problem_json(problem)
    headers = [(b"content-type", PROBLEM_JSON), (b"content-length", b"%d" % len(body)), *problem.headers]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
