"""Messages between a worker and an instance of a model in a process of its own: named arrays with a few facts.

    lengths of head and body -> head: kind, facts, descriptions of the arrays, texts -> body: the numbers of the arrays

Neither side trusts the bytes of the other with more than numbers and text: there is no pickle.
"""

from __future__ import annotations

import math
import socket
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from penstock.registry.tensors import Array, encode

__all__ = ["BadMessage", "Channel", "Disconnected", "Message"]

_LENGTHS: Final = struct.Struct("<IQ")
_MOST_HEAD_BYTES: Final = 1 << 30
_MOST_BODY_BYTES: Final = 1 << 35
_NUMBERS: Final = "biufcmM"
"""The kinds of arrays that travel as they are. Text travels beside them, other arrays not at all."""
_SMALL_BYTES: Final = 1 << 16
"""Up to so many bytes a message is sent with one call."""
_RECEIVED_AT_ONCE: Final = 1 << 20


class BadMessage(Exception):
    """The other side sent bytes that are no message."""


class Disconnected(Exception):
    """The other side is gone."""


class Message(NamedTuple):
    """One message. facts: plain data."""

    kind: str
    facts: dict[str, Any]
    arrays: dict[str, Array]


class _Text(msgspec.Struct, frozen=True, array_like=True):
    """An array of text; its elements in UTF-8, in which a lone surrogate is kept."""

    shape: tuple[int, ...]
    elements: list[bytes]


class _Numbers(msgspec.Struct, frozen=True, array_like=True):
    """An array of numbers, whose bytes are in the body. dtype: as NumPy spells it, for example `<f4`."""

    shape: tuple[int, ...]
    dtype: str


class _Head(msgspec.Struct, frozen=True, array_like=True):
    kind: str
    facts: dict[str, Any]
    numbers: dict[str, _Numbers]
    texts: dict[str, _Text]
    order: list[str]


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final = msgspec.msgpack.Decoder(_Head)


class Channel:
    """One end of a connected stream socket. One thread at a time sends and receives; `close` is for any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def send(
        self, kind: str, facts: Mapping[str, Any] | None = None, arrays: Mapping[str, Array] | None = None
    ) -> None:
        """Sends one message. Raises Disconnected, and InvalidInput for arrays that cannot travel: nothing is sent."""
        numbers: dict[str, _Numbers] = {}
        texts: dict[str, _Text] = {}
        parts: list[memoryview] = []
        for name, values in (arrays or {}).items():
            if values.dtype.kind in _NUMBERS:
                numbers[name] = _Numbers(values.shape, values.dtype.str)
                if values.nbytes:
                    parts.append(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
            else:
                texts[name] = _text(name, values)
        head = _encode(_Head(kind, dict(facts or {}), numbers, texts, list(arrays or ())))
        size = sum(part.nbytes for part in parts)
        lengths = _LENGTHS.pack(len(head), size)
        if len(head) + size <= _SMALL_BYTES:
            head, parts = b"".join((head, *parts)), []
        try:
            self._connection.sendall(lengths + head)
            for part in parts:
                self._connection.sendall(part)
        except OSError:
            raise Disconnected from None

    def receive(self) -> Message:
        """The next message; its arrays are its own. Raises Disconnected and BadMessage."""
        head_bytes, body_bytes = _LENGTHS.unpack(self._read(_LENGTHS.size))
        if head_bytes > _MOST_HEAD_BYTES or body_bytes > _MOST_BODY_BYTES:
            raise BadMessage(f"a message of {head_bytes} and {body_bytes} bytes")
        head, body = self._read(head_bytes), memoryview(self._read(body_bytes))
        try:
            kind, facts, numbers, texts, order = msgspec.structs.astuple(_decoder.decode(head))
            found: dict[str, Array] = {name: _array(text) for name, text in texts.items()}
            for name, described in numbers.items():
                dtype = np.dtype(described.dtype)
                size = math.prod(described.shape) * dtype.itemsize
                if dtype.kind not in _NUMBERS:
                    raise BadMessage(f"an array of {dtype}")
                found[name], body = np.frombuffer(body[:size], dtype).reshape(described.shape), body[size:]
            return Message(kind, facts, {name: found[name] for name in order})
        except (msgspec.DecodeError, ValueError, TypeError, LookupError) as error:
            raise BadMessage(f"bytes that cannot be read ({type(error).__name__})") from None

    def close(self) -> None:
        """Ends a `receive` that waits, on either side."""
        try:
            self._connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        finally:
            self._connection.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            try:
                count = self._connection.recv_into(view, min(len(view), _RECEIVED_AT_ONCE))
            except OSError:
                count = 0
            if not count:
                raise Disconnected
            view = view[count:]
        return data


def _text(name: str, values: Array) -> _Text:
    elements = values.ravel().tolist()
    if values.dtype.kind != "O" or not all(isinstance(element, str) for element in elements):
        # Raises the error that the result would meet.
        encode({name: values})
        raise TypeError(f"{name}: an array of {values.dtype}. Expected numbers or text")
    return _Text(values.shape, [element.encode("utf-8", "surrogatepass") for element in elements])


def _array(text: _Text) -> Array:
    values = np.empty(len(text.elements), object)
    values[:] = [element.decode("utf-8", "surrogatepass") for element in text.elements]
    return values.reshape(text.shape)
