"""Commands as Redis reads them. Large words are sent as they lie in memory, piece by piece, without a copy."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Final, TypeAlias

from hiredis import pack_command

from penstock.registry.broker.redis_scripts import Call

__all__ = ["packed", "packed_together"]

_PIECE_BYTES: Final = 1024 * 1024
"""The time-out of a connection counts for each piece."""
_JOINED_BYTES: Final = 256 * 1024
"""Pieces up to this are joined: to copy them costs less than another system call, which may wake the server, too."""
Piece: TypeAlias = bytes | memoryview


def packed(call: Call) -> Iterable[Piece]:
    """The pieces of one command. A word may be a tuple of bytes, which are its parts."""
    try:
        return (pack_command(tuple(call)),)
    except TypeError:
        # hiredis packs no tuples. To ask each word before would cost every call something.
        return _pieces(call)


def packed_together(calls: Iterable[Call]) -> Iterator[Piece]:
    """The pieces of several commands that are sent one after another, as few as it pays."""
    waiting: list[Piece] = []
    nbytes = 0
    for piece in chain.from_iterable(map(packed, calls)):
        if waiting and nbytes + len(piece) > _JOINED_BYTES:
            yield _joined(waiting)
            waiting, nbytes = [], 0
        waiting.append(piece)
        nbytes += len(piece)
    if waiting:
        yield _joined(waiting)


def _joined(pieces: Sequence[Piece]) -> Piece:
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _pieces(call: Call) -> Iterator[Piece]:
    head = bytearray(b"*%d\r\n" % len(call))
    for word in call:
        parts = word if isinstance(word, tuple) else (word if isinstance(word, bytes) else str(word).encode(),)
        head += b"$%d\r\n" % sum(map(len, parts))
        for part in parts:
            if len(part) < _PIECE_BYTES:
                head += part
                continue
            yield bytes(head)
            head.clear()
            view = memoryview(part)
            for start in range(0, len(part), _PIECE_BYTES):
                yield view[start : start + _PIECE_BYTES]
        head += b"\r\n"
    yield bytes(head)
