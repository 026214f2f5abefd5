"""A text server on the loopback that answers as the test says, event by event."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

__all__ = ["Asked", "Reply", "TextServer", "chat_event", "event", "usage"]


class Asked(NamedTuple):
    """One request that arrived."""

    path: str
    headers: Mapping[str, str]
    body: dict[str, Any]


class Reply(NamedTuple):
    """What a request gets. events: the data of each; the connection ends after them, without [DONE] of its own."""

    events: Iterable[str] = ()
    status: int = 200
    body: str = ""
    hangs: bool = False
    """Whether the connection stays open and silent until the server is closed."""


Answering = Callable[[Asked], Reply]


def event(text: str, reason: str | None = None, index: int = 0) -> str:
    """A piece of a text."""
    return json.dumps({"choices": [{"index": index, "text": text, "finish_reason": reason}]})


def chat_event(reason: str | None = None, **delta: Any) -> str:
    """A piece of an answer to a chat."""
    return json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def usage(prompt: int = 1, completion: int = 2, cached: int = 0) -> str:
    """The last event before [DONE]."""
    details = {"cached_tokens": cached}
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "prompt_tokens_details": details}
    return json.dumps({"choices": [], "usage": counts})


class TextServer:
    """Listens inside the `with` block. `asked` are all requests, in order."""

    def __init__(self, answer: Answering) -> None:
        self.asked: list[Asked] = []
        self.gone = 0
        """Connections that the client ended before the answer was whole."""
        self.closing = threading.Event()
        self.answer = answer
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.texts = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        """For `runtime_url`."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    texts: TextServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no news."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_POST(self) -> None:
        texts = self.server.texts
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        asked = Asked(self.path, {name.lower(): value for name, value in self.headers.items()}, body)
        texts.asked.append(asked)
        reply = texts.answer(asked)
        self.send_response(reply.status)
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            self.wfile.write(reply.body.encode())
            for data in reply.events:
                self.wfile.write(f"data: {data}\n\n".encode())
                self.wfile.flush()
            while reply.hangs and not texts.closing.wait(0.01):
                self.connection.setblocking(False)
                try:
                    if self.connection.recv(1) == b"":
                        raise ConnectionResetError
                except BlockingIOError:
                    continue
        except OSError:
            texts.gone += 1

    def log_message(self, format: str, *args: Any) -> None:
        """Keeps the output of the tests clean."""
