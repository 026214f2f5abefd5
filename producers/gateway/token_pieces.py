"""The bytes of each token, and the place of each token in a text. Pure.

    tokenizer -> TokenPieces -> bytes of a token -> TokenPlaces -> tokens that begin inside of the text so far

A token may be a part of a character only: then its bytes are no text. A token that begins behind the end of a text is
none of its tokens, such as the model's own end, or a part of a stop string.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

__all__ = ["PlacedToken", "TokenChoice", "TokenPieces", "TokenPlaces", "shown_bytes"]

_REPLACED: Final = "\ufffd"
_BYTE: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR: Final = "a"
_new_decoder: Final = codecs.getincrementaldecoder("utf-8")


class TokenChoice(NamedTuple):
    """A generated token, and the log probabilities of the most probable ones in its place, its own included."""

    id: int
    logprobs: Mapping[int, float]


class PlacedToken(NamedTuple):
    """A token of a text. start: the character of the text in which it begins."""

    start: int
    choice: TokenChoice


class TokenPieces:
    """The bytes of the tokens of a tokenizer of the library `tokenizers`. For one thread."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        added: Mapping[int, Any] = backend.get_added_tokens_decoder()
        self._special = frozenset(number for number, token in added.items() if token.special)
        # In front of a token, so that a space at its beginning is kept.
        self._anchor: list[int] = backend.encode(_ANCHOR, add_special_tokens=False).ids[-1:]
        self._before = len(self._decode(self._anchor))
        self._known: dict[int, bytes] = {}

    def of(self, token: int) -> bytes:
        """Its bytes in the text. Those of a special token are its name; empty for a number that no token has."""
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._read(token)
        return found

    def in_text(self, token: int) -> bytes:
        """Its bytes in a text, which has no special tokens."""
        return b"" if token in self._special else self.of(token)

    def _read(self, token: int) -> bytes:
        name: str | None = self._backend.id_to_token(token)
        if name is None:
            return b""
        if token in self._special:
            return name.encode()
        if (byte := _BYTE.fullmatch(name)) is not None:
            return bytes([int(byte[1], 16)])
        text = self._decode([*self._anchor, token])[self._before :]
        if _REPLACED in text and all(letter in _BYTE_OF for letter in name):
            return bytes(_BYTE_OF[letter] for letter in name)
        return text.encode()

    def _decode(self, tokens: Sequence[int]) -> str:
        text: str = self._backend.decode(tokens, skip_special_tokens=False)
        return text


class TokenPlaces:
    """The tokens of one text that grows. Tokens may come before or after the characters that they give."""

    def __init__(self, pieces: TokenPieces) -> None:
        self._pieces = pieces
        self._decoder = _new_decoder("replace")
        self._waiting: list[PlacedToken] = []
        self._decoded = 0
        self._length = 0
        self._first = ""
        """What the first token that is text gives."""
        self._is_stripped = False
        """Whether the text lacks the space at its beginning."""

    def take(self, text: str, tokens: Sequence[TokenChoice]) -> list[PlacedToken]:
        """The text has these characters more, and these tokens were generated. The tokens that begin inside of it."""
        for choice in tokens:
            piece = self._pieces.in_text(choice.id)
            # A part of a character that is not continued becomes a character of its own, before this token.
            is_cut_off = bool(self._decoder.getstate()[0] and piece and piece[0] & 0xC0 != 0x80)
            self._waiting.append(PlacedToken(self._decoded + is_cut_off, choice))
            new = self._decoder.decode(piece)
            self._first = self._first or new
            self._decoded += len(new)
        if text and not self._length:
            self._is_stripped = self._first.startswith(" ") and not text.startswith(" ")
        self._length += len(text)
        return list(self._inside())

    def _inside(self) -> Iterator[PlacedToken]:
        while self._waiting:
            start = max(0, self._waiting[0].start - self._is_stripped)
            if start >= self._length:
                return
            yield PlacedToken(start, self._waiting.pop(0).choice)


def shown_bytes(piece: bytes) -> str:
    """A token as a text. Bytes that are none: `bytes:` and their numbers, as OpenAI shows them."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _byte_letters() -> dict[str, int]:
    """The letters by which tokenizers of bytes write each byte (Radford et al. 2019, `bytes_to_unicode`)."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


_BYTE_OF: Final = _byte_letters()
