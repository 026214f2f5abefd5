"""Unary gRPC calls as bare frames of HTTP/2: the load generator must cost less than the server that is measured.

    rows -> HEADERS and DATA of each call -> one connection -> DATA of the answer -> logits

The frames are those that the protocol needs (RFC 9113). The heads never change, so they are literals without
an index (RFC 7541), and of an answer only the data is read. An answer without data is an error.
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

__all__ = ["Connection"]

_PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS = 1, 1, 4
_MOST: Final = (1 << 31) - 1
_FIRST_WINDOW: Final = 65_535
_HEAD_BYTES: Final = 9
_new_head: Final = struct.Struct(">IBI").pack
"""The length and the kind of a frame as one number, its flags, its stream."""
_read_head: Final = struct.Struct(">IBI").unpack_from


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return _new_head(len(body) << 8 | kind, flags, stream) + body


def _literal(name: str, value: str) -> bytes:
    return b"\0%c%s%c%s" % (len(name), name.encode(), len(value), value.encode())


class Connection(asyncio.Protocol):
    """One connection, whose calls run at the same time. head: the block of HEADERS of each call."""

    def __init__(self, head: bytes) -> None:
        self._head = head
        self._stream = -1
        self._calls: dict[int, tuple[asyncio.Future[bytes], bytearray]] = {}
        self._window = _FIRST_WINDOW
        self._has_room = asyncio.Event()
        self._rest = b""

    @classmethod
    async def open(cls, address: str, method: str) -> Connection:
        """Connects. address: host:port. method: /service/method."""
        host, _, port = address.rpartition(":")
        fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": address}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        head = b"".join(_literal(name, value) for name, value in fields.items())
        _, connection = await asyncio.get_running_loop().create_connection(lambda: cls(head), host, int(port))
        return connection

    async def call(self, message: bytes) -> bytes:
        """The answer to one message. Raises ConnectionError."""
        self._stream += 2
        stream = self._stream
        body = b"\0" + struct.pack(">I", len(message)) + message
        while self._window < len(body):
            self._has_room.clear()
            await self._has_room.wait()
        self._window -= len(body)
        answered: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._calls[stream] = answered, bytearray()
        self._write(_frame(_HEADERS, _END_HEADERS, stream, self._head) + _frame(_DATA, _END_STREAM, stream, body))
        return await answered

    def close(self) -> None:
        """Ends the connection."""
        self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio.Protocol."""
        assert isinstance(transport, asyncio.Transport)
        self._transport, self._write = transport, transport.write
        # The windows of its answers are as wide as they may be: no answer waits.
        settings = _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, _MOST))
        self._write(_PREFACE + settings + _frame(_WINDOW, 0, 0, struct.pack(">I", _MOST - _FIRST_WINDOW)))

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        data, place = self._rest + data, 0
        while len(data) - place >= _HEAD_BYTES:
            length_and_kind, flags, stream = _read_head(data, place)
            begin = place + _HEAD_BYTES
            end = begin + (length_and_kind >> 8)
            if end > len(data):
                break
            self._take(length_and_kind & 0xFF, flags, stream, data[begin:end])
            place = end
        self._rest = data[place:]

    def connection_lost(self, problem: Exception | None) -> None:
        """See asyncio.Protocol."""
        for answered, _ in self._calls.values():
            answered.set_exception(ConnectionError(f"The connection ended: {problem}"))

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _DATA:
            self._calls[stream][1].extend(body)
        elif kind == _HEADERS and flags & _END_STREAM:
            answered, data = self._calls.pop(stream)
            if data:
                answered.set_result(bytes(data[5:]))
            else:
                answered.set_exception(ConnectionError("The gateway refused a call"))
        elif kind == _WINDOW and stream == 0:
            self._window += int.from_bytes(body, "big")
            self._has_room.set()
        elif kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._write(_frame(kind, _ACK, 0, body if kind == _PING else b""))
        elif kind == _GOAWAY:
            self._transport.abort()
