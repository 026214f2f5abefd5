"""One HTTP request and its answer, on ASGI. It bounds what a client can make the process hold and wait for.

    head -> type and declared length (415, 413 before a byte is read) -> body, within a time -> answer, or parts of it

A client that has gone is noticed while a route waits: see `watch`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, MutableMapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import parse_qsl, quote, unquote_plus

from penstock.producers.gateway.callers import NOBODY, Credentials, Entry
from penstock.producers.gateway.limits import headers_of
from penstock.registry.errors import InvalidInput

__all__ = [
    "JSON",
    "CallerRevoked",
    "ClientGone",
    "Exchange",
    "Limits",
    "Message",
    "Receive",
    "RequestRefused",
    "Scope",
    "Send",
    "take_query_key",
]

Scope: TypeAlias = MutableMapping[str, Any]
Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]

JSON: Final = b"application/json"
_JSON_TYPES: Final = frozenset({"", JSON.decode()})
_PLAIN_ENCODINGS: Final = frozenset({b"", b"identity"})
_WATCH_AFTER_S: Final = 0.02
"""Most answers come sooner, and need no task that listens for the end of the connection."""
_CLOSE: Final = ((b"connection", b"close"),)
"""Of an answer behind which the rest of the body may come."""
_NO_CONTENT: Final = 204
_MOST_QUERY: Final = 32
_QUERY_KEY: Final = "api_key"


class Limits(NamedTuple):
    """What one request may take: bytes of its body, and seconds in which the client must send or take its bytes."""

    max_bytes: int
    client_timeout_s: float


class ClientGone(Exception):
    """The client has closed the connection: nobody reads an answer."""


class CallerRevoked(ClientGone):
    """The API key of the request stopped working while the request waited: it ends as one whose client has gone."""


class RequestRefused(Exception):
    """The request itself is refused, whatever job it names: its length, type, method, path or headers."""

    def __init__(self, status: int, detail: str, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers


class Exchange:
    """One request and its answer.

    words: the parts of the path that the route names. about: headers of the job that the request is about, which every
    answer has, an error's too. entry: of its caller, whose limits every answer tells; nobody's before the caller is
    known, and on a route that is open to everybody.
    """

    __slots__ = (
        "_limits",
        "_receive",
        "_send",
        "about",
        "credentials",
        "entry",
        "has_begun",
        "headers",
        "method",
        "path",
        "scope",
        "status",
        "words",
    )

    def __init__(self, scope: Scope, receive: Receive, send: Send, limits: Limits) -> None:
        self.scope = scope
        self.method: str = scope["method"]
        self.path: str = scope["path"].removeprefix(scope.get("root_path", ""))
        self.headers: dict[bytes, bytes] = dict(scope["headers"])
        self.words: Mapping[str, str] = {}
        self.about: list[tuple[bytes, bytes]] = []
        self.entry = Entry(NOBODY)
        self.credentials = Credentials(self.header(b"authorization"), self.header(b"x-api-key"), take_query_key(scope))
        self.status = 0
        """Of the answer, once its head was sent."""
        self.has_begun = False
        """Whether the head of the answer was sent: then no other answer can be."""
        self._receive = receive
        self._send = send
        self._limits = limits

    def header(self, name: bytes) -> str:
        """The value of a header; empty without one. name: in lower case."""
        return self.headers.get(name, b"").decode("latin-1")

    def header_list(self, name: bytes) -> str:
        """The value of a header that is a list: its lines are joined. Empty without one. name: in lower case."""
        lines: list[bytes] = [value for key, value in self.scope["headers"] if key == name]
        return b", ".join(lines).decode("latin-1")

    @property
    def mount_path(self) -> str:
        """The path, ready for a URL, under which another application or a proxy has this one; empty for none."""
        return quote(self.scope.get("root_path", "").rstrip("/"))

    @property
    def media_type(self) -> str:
        """The type of the body, without its parameters."""
        return self.header(b"content-type").partition(";")[0].strip().lower()

    def query(self) -> dict[str, str]:
        """The parameters of the query; the last one of a name wins. Raises InvalidInput."""
        raw: bytes = self.scope.get("query_string", b"")
        if not raw:
            return {}
        try:
            return dict(parse_qsl(raw.decode("ascii"), keep_blank_values=True, max_num_fields=_MOST_QUERY))
        except ValueError:
            raise InvalidInput(f"An unreadable query. Expected at most {_MOST_QUERY} parameters in ASCII") from None

    async def json_body(self) -> bytes:
        """The whole body of a route that takes only JSON. No type at all is taken for JSON.

        Raises RequestRefused for another type, and as `body` does.
        """
        kind = self.headers.get(b"content-type", JSON)
        if kind != JSON and self.media_type not in _JSON_TYPES:
            raise RequestRefused(415, "An unknown content type. Expected `Content-Type: application/json`")
        return await self.body()

    async def body(self) -> bytes:
        """The whole body. Raises RequestRefused for one that is compressed, is too long or comes too slowly."""
        self._refuse_compressed()
        most = self._limits.max_bytes
        declared = self.headers.get(b"content-length")
        if declared is not None and (not declared.isdigit() or len(declared) > 18 or int(declared) > most):
            raise _too_long(most)
        try:
            with _Limit(self._limits.client_timeout_s):
                return await self._read(most)
        except TimeoutError:
            raise self._too_slow() from None

    async def parts(self, most: int) -> AsyncIterator[bytes]:
        """The body in parts, for a route that keeps no whole body. Each part has the time of a body.

        Raises RequestRefused for a compressed body, one of over `most` bytes and for a part that comes too slowly.
        """
        self._refuse_compressed()
        declared = self.headers.get(b"content-length")
        if declared is not None and (not declared.isdigit() or len(declared) > 18 or int(declared) > most):
            raise _too_long(most)
        left, is_last = most, False
        while not is_last:
            try:
                async with asyncio.timeout(self._limits.client_timeout_s):
                    message = await self._receive()
            except TimeoutError:
                raise self._too_slow() from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            left -= len(part)
            if left < 0:
                raise _too_long(most)
            is_last = not message.get("more_body", False)
            if part:
                yield part

    def _refuse_compressed(self) -> None:
        if self.headers.get(b"content-encoding", b"identity").lower() not in _PLAIN_ENCODINGS:
            raise RequestRefused(415, "A compressed body. Expected one without Content-Encoding")

    def _too_slow(self) -> RequestRefused:
        return RequestRefused(
            408, f"The body did not come within {self._limits.client_timeout_s:g} s. Expected a faster sender", _CLOSE
        )

    async def _read(self, most: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            part: bytes = message.get("body", b"")
            size += len(part)
            if size > most:
                raise _too_long(most)
            if not message.get("more_body", False):
                return part if not parts else b"".join((*parts, part))
            parts.append(part)

    async def answer(
        self,
        status: int,
        body: bytes = b"",
        content_type: bytes = JSON,
        headers: Iterable[tuple[bytes, bytes]] = (),
    ) -> None:
        """The whole answer."""
        # RFC 9110 8.6: an answer 204 has no length.
        head = [*headers] if status == _NO_CONTENT else [(b"content-length", b"%d" % len(body)), *headers]
        if body:
            head.append((b"content-type", content_type))
        await self._begin(status, head)
        await self._send({"type": "http.response.body", "body": b"" if self.method == "HEAD" else body})

    async def begin_stream(
        self, content_type: bytes, headers: Iterable[tuple[bytes, bytes]] = (), status: int = 200
    ) -> None:
        """The head of an answer whose parts follow."""
        await self._begin(status, [(b"content-type", content_type), *headers])

    async def write(self, part: bytes) -> None:
        """One part of a stream. Raises TimeoutError for a client that does not take those before it."""
        async with asyncio.timeout(self._limits.client_timeout_s):
            await self._send({"type": "http.response.body", "body": part, "more_body": True})

    async def end_stream(self) -> None:
        """The end of a stream."""
        async with asyncio.timeout(self._limits.client_timeout_s):
            await self._send({"type": "http.response.body", "body": b""})

    def watch(self) -> AbstractContextManager[None]:
        """Inside of the block the end of the connection ends the task's wait, and so does that of the caller's key.

        The body has been read before. Raises ClientGone.
        """
        return _Watch(self._receive, self.entry)

    async def _begin(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.has_begun, self.status = True, status
        told = [*self.about, *headers_of(self.entry.readings), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": told})


class _Limit:
    """`asyncio.timeout`, which costs a request three times as much. Most bodies are there already."""

    __slots__ = ("_cancelling", "_is_over", "_seconds", "_task", "_timer")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._is_over = False

    def __enter__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("A time-out needs a task")
        self._task, self._cancelling = task, task.cancelling()
        self._timer = asyncio.get_running_loop().call_later(self._seconds, self._end)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        # Another one may have cancelled the task, too, and that goes on.
        if self._is_over and self._task.uncancel() <= self._cancelling and isinstance(error, asyncio.CancelledError):
            raise TimeoutError from None

    def _end(self) -> None:
        self._is_over = True
        self._task.cancel()


class _Watch:
    """See Exchange.watch. A class: each prediction enters it, and a generator takes twice as long."""

    __slots__ = ("_end", "_end_watch", "_entry", "_receive", "_task", "_timer", "_watcher")

    def __init__(self, receive: Receive, entry: Entry) -> None:
        self._receive = receive
        self._entry = entry
        self._end: type[ClientGone] | None = None
        self._end_watch: Callable[[], object] | None = None
        self._watcher: asyncio.Task[None] | None = None

    def __enter__(self) -> None:
        self._task = asyncio.current_task()
        self._timer = asyncio.get_running_loop().call_later(_WATCH_AFTER_S, self._begin)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        if self._end_watch is not None:
            self._end_watch()
        if self._end is not None and self._task is not None and isinstance(error, asyncio.CancelledError):
            self._task.uncancel()
            raise self._end from None

    def _begin(self) -> None:
        self._watcher = asyncio.get_running_loop().create_task(self._await_end())
        self._end_watch = self._entry.on_revoked(lambda: self._cancel(CallerRevoked))

    async def _await_end(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._cancel(ClientGone)

    def _cancel(self, end: type[ClientGone]) -> None:
        if self._end is None and self._task is not None:
            self._end = end
            self._task.cancel()


def take_query_key(scope: Scope) -> str:
    """The parameter `api_key`, which is removed: the logs of servers have the query of the scope."""
    raw: bytes = scope.get("query_string", b"")
    if not raw:
        return ""
    parts = [(unquote_plus(part.partition(b"=")[0].decode("latin-1")), part) for part in raw.split(b"&")]
    texts = [part.partition(b"=")[2] for name, part in parts if name == _QUERY_KEY]
    if not texts:
        return ""
    scope["query_string"] = b"&".join(part for name, part in parts if name != _QUERY_KEY)
    return unquote_plus(texts[-1].decode("latin-1"))


def _too_long(most: int) -> RequestRefused:
    return RequestRefused(413, f"The body is too long. Expected at most {most} bytes", _CLOSE)
