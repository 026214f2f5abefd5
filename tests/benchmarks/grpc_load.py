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


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _literal(name: str, value: str) -> bytes:
    return b"\0%c%s%c%s" % (len(name), name.encode(), len(value), value.encode())


class Connection:
    """One connection, whose calls run at the same time."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        self._reader = reader
        self._writer = writer
        self._head = head
        self._stream = -1
        self._calls: dict[int, tuple[asyncio.Future[bytes], bytearray]] = {}
        self._window = _FIRST_WINDOW
        self._has_room = asyncio.Event()
        # The windows of its answers are as wide as they may be: no answer waits.
        settings = _frame(_SETTINGS, 0, 0, struct.pack(">HI", 4, _MOST))
        writer.write(_PREFACE + settings + _frame(_WINDOW, 0, 0, struct.pack(">I", _MOST - _FIRST_WINDOW)))
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @classmethod
    async def open(cls, address: str, method: str) -> Connection:
        """Connects. address: host:port. method: /service/method."""
        host, _, port = address.rpartition(":")
        fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": address}
        fields |= {"te": "trailers", "content-type": "application/grpc"}
        head = b"".join(_literal(name, value) for name, value in fields.items())
        return cls(*await asyncio.open_connection(host, int(port)), head)

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
        self._writer.write(
            _frame(_HEADERS, _END_HEADERS, stream, self._head) + _frame(_DATA, _END_STREAM, stream, body)
        )
        return await answered

    def close(self) -> None:
        """Ends the connection."""
        self._reading.cancel()
        self._writer.close()

    async def _read(self) -> None:
        try:
            while True:
                head = await self._reader.readexactly(9)
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                body = await self._reader.readexactly(int.from_bytes(head[:3], "big"))
                self._take(kind, flags, stream, body)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            for answered, _ in self._calls.values():
                answered.set_exception(ConnectionError(f"The connection ended: {error}"))

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
            self._writer.write(_frame(kind, _ACK, 0, body if kind == _PING else b""))
        elif kind == _GOAWAY:
            raise ConnectionError("the gateway goes away")
