"""Commands on the wire: what Redis reads is the same, whether a word is sent whole or in pieces."""

from __future__ import annotations

from typing import Any

from hiredis import pack_command
from hypothesis import given
from hypothesis import strategies as st

from penstock.registry.broker.redis_packing import packed, packed_together

MIB = 1 << 20
WORDS = st.one_of(st.text(max_size=20), st.binary(max_size=40), st.integers(-10, 1 << 40), st.floats(allow_nan=False))


@given(st.lists(WORDS, min_size=1, max_size=8), st.integers(0, 8), st.binary(max_size=20), st.binary(max_size=40))
def test_a_word_in_parts_is_the_same_word(words: list[Any], at: int, head: bytes, body: bytes):
    """Beside words of every other kind."""
    whole, parts = [*words[:at], head + body, *words[at:]], [*words[:at], (head, body), *words[at:]]
    assert b"".join(packed(parts)) == b"".join(packed(whole)) == pack_command(tuple(whole))


def test_large_parts_are_sent_as_they_lie_in_memory():
    """In pieces of a MiB, without a copy: each piece has the time-out of the connection."""
    body = bytes(5 * MIB // 2)
    pieces = list(packed(["SET", "key", (b"C-", body), "PX", 10]))
    views = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert [len(view) for view in views] == [MIB, MIB, MIB // 2]
    assert all(view.obj is body for view in views)
    whole: list[Any] = ["SET", "key", b"C-" + body, "PX", 10]
    assert b"".join(pieces) == pack_command(tuple(whole))


@given(st.lists(st.lists(WORDS, min_size=1, max_size=4), min_size=1, max_size=4))
def test_small_commands_are_sent_in_one_piece(commands: list[list[Any]]):
    """The bytes of each, one after another."""
    (piece,) = packed_together(commands)
    assert piece == b"".join(pack_command(tuple(command)) for command in commands)


def test_large_pieces_are_not_copied_for_a_small_one():
    """The small commands before and behind them are joined among themselves."""
    body = bytes(2 * MIB)
    commands: list[list[Any]] = [["GET", "a"], ["GET", "b"], ["SET", "c", (b"C-", body)], ["GET", "d"], ["GET", "e"]]
    pieces = list(packed_together(commands))
    views = [piece for piece in pieces if isinstance(piece, memoryview)]
    assert [view.obj is body for view in views] == [True, True]
    assert [len(piece) for piece in pieces[1:3]] == [MIB, MIB]
    assert len(pieces) == 4
    assert b"".join(pieces) == b"".join(b"".join(packed(command)) for command in commands)
