"""Chunks and progress reports of one job <-> the body of one event envelope.

    body: a msgpack list of [data, content, fraction], one for each event, in order

One envelope holds all events that were written together: its header and its signature cost more than a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Final

import msgspec

from penstock.registry.errors import InvalidInput, UndecodableEnvelope
from penstock.registry.tensors import MAX_RESULT_BYTES, Array, Tensor, check_decodable, decode, encode

__all__ = ["MAX_CHUNK_BYTES", "MAX_PARTS", "EventPart", "ReceivedPart", "chunk_part", "decode_parts", "encode_parts"]

MAX_CHUNK_BYTES: Final = MAX_RESULT_BYTES - 64 * 1024
"""The largest chunk in bytes: the cap of an envelope less the descriptions of 64 tensors."""
MAX_PARTS: Final = 4096
"""The most events in one envelope."""
_MAX_NAME: Final = 64


class EventPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event to send: a chunk, or a progress report with its `fraction`.

    content: the tensors in `data`. None: the same as of the chunk before.
    """

    data: bytes = b""
    content: tuple[Tensor, ...] | None = None
    fraction: float | None = None


class ReceivedPart(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One event as it was received; see EventPart."""

    data: memoryview
    content: tuple[Tensor, ...] | None
    fraction: float | None

    def values(self, content: tuple[Tensor, ...]) -> dict[str, Array]:
        """The arrays of a chunk. Raises UndecodableEnvelope."""
        return decode(content, self.data)


_encode: Final = msgspec.msgpack.Encoder().encode
_decoder: Final[Any] = msgspec.msgpack.Decoder(Annotated[list[ReceivedPart], msgspec.Meta(max_length=MAX_PARTS)])


def chunk_part(values: Mapping[str, Array], like: tuple[Tensor, ...] | None, max_bytes: int) -> EventPart:
    """The part of a chunk. like: the content of an earlier chunk, which is not checked again.

    Raises InvalidInput for values that no reader could decode, and for more than `max_bytes`.
    """
    # Counted first: a copy of a chunk that is far too large could take the last memory.
    _check_size(sum([array.nbytes for array in values.values()]), max_bytes)
    content, data = encode(values) if values else ((), b"")
    _check_size(len(data), max_bytes)
    if content == like:
        return EventPart(data, like)
    check_decodable(content)
    for name in values:
        if not 0 < len(name) <= _MAX_NAME or not name.isprintable():
            raise InvalidInput(f"A name has {len(name)} characters. Expected 1 to {_MAX_NAME} printable ones")
    return EventPart(data, content)


def _check_size(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise InvalidInput(f"It has {size} bytes. Expected at most {max_bytes}")


def encode_parts(parts: Iterable[EventPart]) -> bytes:
    """The body of these events. Chunks in a row with the same `content` object share its description."""
    written: list[EventPart] = []
    last: tuple[Tensor, ...] | None = None
    for part in parts:
        if part.content is None or part.content is not last:
            written.append(part)
        else:
            written.append(EventPart(part.data))
        last = last if part.content is None else part.content
    return _encode(written)


def decode_parts(body: memoryview | bytes) -> list[tuple[ReceivedPart, tuple[Tensor, ...]]]:
    """The events of a body, each with the content of its chunk. Raises UndecodableEnvelope."""
    try:
        parts: list[ReceivedPart] = _decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UndecodableEnvelope("its body is no list of events") from None
    described = []
    content: tuple[Tensor, ...] | None = None
    for part in parts:
        content = content if part.content is None else part.content
        if part.fraction is None and content is None:
            raise UndecodableEnvelope("a chunk has no description")
        described.append((part, content or ()))
    return described
