"""Tokens of one request -> text, as it grows: no half characters, and nothing of a stop string or behind it.

    tokens -> decoded behind the last whole piece -> incomplete character held back -> possible stop held back -> delta

Only the last pieces are decoded again, so the cost of a token does not grow with the text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from penstock.workers.generation.stop_strings import first_stop, held_back

__all__ = ["TextStream", "decode"]

_INCOMPLETE: Final = "\ufffd"
"""The sign for a byte that is no part of a whole character yet."""


def decode(tokenizer: Any, tokens: Sequence[int]) -> str:
    """The text of the tokens, without special ones, as it is: no spaces are removed before punctuation."""
    return _decoding(tokenizer)(list(tokens))


def _decoding(tokenizer: Any) -> Callable[[list[int]], str]:
    """The call behind a fast tokenizer's own `decode`, which takes several times as long for the few tokens of a step.

    That is used where a class or the object may have changed it.
    """
    from transformers import PreTrainedTokenizerFast

    is_own = getattr(type(tokenizer), "_decode", None) is PreTrainedTokenizerFast._decode
    if is_own and not {"decode", "_decode"} & set(vars(tokenizer)):
        decode_fast: Callable[..., str] = tokenizer.backend_tokenizer.decode
        return lambda tokens: decode_fast(tokens, skip_special_tokens=True)
    decode_any: Callable[..., str] = tokenizer.decode
    return lambda tokens: decode_any(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class TextStream:
    """The text of one request. `stopped_by` is the stop string that ended it."""

    def __init__(self, tokenizer: Any, stops: Sequence[str]) -> None:
        self.stopped_by: str | None = None
        self._decode: Final = _decoding(tokenizer)
        self._stops: Final = tuple(stops)
        self._longest: Final = max(map(len, stops), default=1)
        self._tokens: list[int] = []
        self._context = 0
        self._read = 0
        """Tokens before `_read` are in the text for good; those from `_context` on give them their surroundings."""
        self._whole = ""
        """Text of the tokens before `_read`."""
        self._text = ""
        self._is_behind = False
        """Whether tokens were pushed that are not decoded yet."""
        self._delivered = 0
        self._may_stop = True
        self._free = 0
        """So much of the text came before it might stop: no stop string that ends there counts."""

    @property
    def text(self) -> str:
        """The text of all tokens, cut before a stop string."""
        self._catch_up()
        return self._text

    def push(self, tokens: Sequence[int], *, may_stop: bool = True) -> None:
        """More tokens. Nothing changes any more once a stop string was found.

        Without stop strings they are decoded when the text is asked for, those of several calls at a time. may_stop:
        whether a stop string counts that ends in them.
        """
        self._may_stop = may_stop
        if self.stopped_by is None:
            self._tokens += tokens
            self._is_behind = True
            if self._stops:
                self._catch_up()

    def finish(self) -> None:
        """No more tokens come: characters that remained incomplete are in the text, too."""
        if self.stopped_by is None:
            self._is_behind = False
            self._extend(is_last=True)

    def skip(self, characters: int) -> None:
        """So much of the text was delivered before."""
        self._delivered = characters

    def take(self, *, is_last: bool) -> str:
        """The text since the last call. Before the end it leaves out what may become a stop string."""
        self._catch_up()
        end = (
            len(self._text)
            if is_last or self.stopped_by is not None
            else len(self._text) - held_back(self._text, self._stops)
        )
        delta = self._text[self._delivered : end]
        self._delivered = max(self._delivered, end)
        return delta

    def _catch_up(self) -> None:
        if self._is_behind:
            self._is_behind = False
            self._extend(is_last=False)

    def _extend(self, *, is_last: bool) -> None:
        before = self._decode(self._tokens[self._context : self._read])
        found = self._decode(self._tokens[self._context :])
        # Of a character that has begun, each byte may be one of these, and those of whole characters beside it, too:
        # tokenizers that fall back to bytes decode a run of them as a whole.
        stable = found if is_last else found.rstrip(_INCOMPLETE)
        searched_from = max(0, len(self._text) - self._longest)
        self._text = self._whole + stable[len(before) :]
        if stable == found and len(found) > len(before):
            self._whole = self._text
            self._context, self._read = self._read, len(self._tokens)
        self._cut(searched_from)

    def _cut(self, start: int) -> None:
        if not self._may_stop:
            self._free = len(self._text)
        elif (found := first_stop(self._text, self._stops, start, self._free)) is not None:
            place, self.stopped_by = found
            self._text = self._text[:place]
