"""A receiver of webhooks on the loopback: it keeps each call, and answers as the test says."""

from __future__ import annotations

import base64
import hmac
import json
import ssl
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple, Self

__all__ = ["HANG", "Call", "Receiver", "Reply", "verify"]


class Call(NamedTuple):
    """One POST that arrived."""

    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        """The body as data."""
        found: dict[str, Any] = json.loads(self.body)
        return found

    @property
    def id(self) -> str:
        """The id of the event, by its header."""
        return self.headers["webhook-id"]


class Reply(NamedTuple):
    """What a call gets."""

    status: int = 200
    headers: Mapping[str, str] = {}


HANG = Reply(0)
"""No answer, until the receiver is closed."""
Answering = Callable[[Call], Reply]


class Receiver:
    """Listens inside the `with` block. `calls` are all that came, in order."""

    def __init__(self, answer: Answering = lambda call: Reply(), *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.calls: list[Call] = []
        self.closing = threading.Event()
        self._answer = answer
        self._server = _Server((host, port), _Handler)
        self._server.receiver = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._server.server_address[1])

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        """The URL of a path."""
        return f"http://{host}:{self.port}{path}"

    def wrap(self, tls: ssl.SSLContext) -> None:
        """Speak TLS from now on."""
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)

    def reply_to(self, call: Call) -> Reply:
        """Note the call, and decide about its answer."""
        self.calls.append(call)
        return self._answer(call)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    receiver: Receiver
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A deliverer that hung up is what tests are about."""


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        receiver = self.server.receiver
        reply = receiver.reply_to(Call(self.path, headers, body))
        if reply is HANG:
            receiver.closing.wait(180)
            return
        self.send_response(reply.status)
        for name, value in reply.headers.items():
            self.send_header(name, value)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing on stderr."""


def verify(call: Call, secret: str) -> bool:
    """Whether one of the signatures is right: the rules of Standard Webhooks, written without our code."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    signed = b".".join([call.id.encode(), call.headers["webhook-timestamp"].encode(), call.body])
    expected = base64.b64encode(hmac.new(key, signed, "sha256").digest()).decode()
    given = [each.partition(",") for each in call.headers["webhook-signature"].split(" ")]
    return any(version == "v1" and hmac.compare_digest(signature, expected) for version, _, signature in given)
