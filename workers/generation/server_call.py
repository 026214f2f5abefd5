"""One POST to a text server, to an address that may be called: its answer comes as events or as a whole.

    connection -> request -> status -> events: `data: ...`, `data: [DONE]`
                                   `-> the beginning of an error's body

While it connects and reads, it blocks for at most half a second at a time, so that its caller can look whether the job
was cancelled. It follows no redirect and uses no proxy.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

import h11

from penstock.registry.errors import ForwardTimeout, ModelError
from penstock.workers.generation.server_address import ServerAddress, ServerAway

__all__ = ["Refusal", "ServerCall"]

_SEND_S: Final = 15.0
"""Shorter than the limit of a forward, within which the job must show progress."""
_LOOK_S: Final = 0.5
_READ_BYTES: Final = 65_536
_MOST_EVENT_BYTES: Final = 1 << 20
_MOST_ERROR_BYTES: Final = 16_384
_BUSY: Final = (429, 502, 503, 504)
_DONE: Final = b"[DONE]"


class Refusal(NamedTuple):
    """An answer that is no success: its HTTP status, and the beginning of its body."""

    status: int
    body: bytes


class ServerCall:
    """One request. close: at any time; the server sees that the connection ends.

    silence_s: so long it may send nothing, and take no connection. ends_with_done: whether [DONE] ends a whole answer.
    """

    def __init__(self, address: ServerAddress, silence_s: float, *, ends_with_done: bool = True) -> None:
        self._address: Final = address
        self._silence_s: Final = silence_s
        self._ends_with_done: Final = ends_with_done
        self._http: Final = h11.Connection(h11.CLIENT)
        self._socket: socket.socket | None = None

    def post(self, path: str, headers: Mapping[str, str], body: bytes) -> Iterator[bytes | Refusal | None]:
        """The data of each event of the answer, without [DONE], and None where there is none for a while.

        A single Refusal: the server refused. Raises ServerAway, and ForwardTimeout after `silence_s` without a byte.
        """
        self._socket = yield from self._address.connect(self._silence_s)
        fields = [("host", self._address.netloc), *headers.items(), ("content-length", str(len(body)))]
        try:
            request = h11.Request(method="POST", target=self._address.path + path, headers=fields)
        except h11.LocalProtocolError:
            # Its message shows the field, which may be the key.
            raise ModelError("The request to the text server has a field that HTTP does not allow") from None
        parts = [self._http.send(request), self._http.send(h11.Data(data=body)), self._http.send(h11.EndOfMessage())]
        self._socket.settimeout(_SEND_S)
        try:
            self._socket.sendall(b"".join(part or b"" for part in parts))
            self._socket.settimeout(_LOOK_S)
            yield from self._answer()
        except ForwardTimeout:
            # It is an OSError, too.
            raise
        except h11.RemoteProtocolError:
            raise ServerAway("it ended its answer before it was whole") from None
        except OSError as error:
            raise ServerAway(error.strerror or type(error).__name__) from None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _answer(self) -> Iterator[bytes | Refusal | None]:
        status, waiting = 0, b""
        for event in self._events():
            if isinstance(event, h11.Response):
                status = event.status_code
                if status in _BUSY:
                    raise ServerAway(f"it answered {status}")
            elif isinstance(event, h11.Data):
                waiting += bytes(event.data)
                if status != 200:
                    waiting = waiting[:_MOST_ERROR_BYTES]
                    continue
                *lines, waiting = waiting.split(b"\n")
                for line in lines:
                    name, _, value = line.rstrip(b"\r").partition(b":")
                    if name == b"data":
                        if value.strip() == _DONE:
                            return
                        yield value
                if len(waiting) > _MOST_EVENT_BYTES:
                    raise ModelError("The text server sent an event that is too large. Expected chunks of text")
            elif event is None:
                yield None
        if status != 200:
            yield Refusal(status, waiting)
        elif self._ends_with_done:
            raise ServerAway("it ended its answer before [DONE]")

    def _events(self) -> Iterator[h11.Response | h11.Data | None]:
        """What the server sends, to the end of its answer; None where it sends nothing for a while."""
        silent_at = time.monotonic() + self._silence_s
        while not isinstance(event := self._http.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            if event is not h11.NEED_DATA:
                if isinstance(event, h11.Response | h11.Data):
                    yield event
                continue
            try:
                found = self._socket.recv(_READ_BYTES) if self._socket is not None else b""
            except TimeoutError:
                if time.monotonic() > silent_at:
                    raise ForwardTimeout(
                        f"The text server sent nothing for {self._silence_s:g} s (generate.runtime_timeout_s)"
                    ) from None
                yield None
                continue
            silent_at = time.monotonic() + self._silence_s
            self._http.receive_data(found)
