"""Log probabilities of generated tokens, in the two forms that OpenAI has.

TokenPlaces -> PlacedToken -> chat_logprobs: one object for each token
                           `-> completion_logprobs: four lists side by side
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from penstock.producers.gateway.token_pieces import PlacedToken, TokenPieces, TokenPlaces, shown_bytes
from penstock.registry.errors import InvalidInput

__all__ = [
    "ChatLogprobs",
    "CompletionLogprobs",
    "LogprobWish",
    "chat_logprobs",
    "completion_logprobs",
    "wished_top",
]

_LEAST: Final = -9999.0
"""In place of minus infinity, which JSON has not."""
_MOST_TOP: Final = 20


class TopLogprob(msgspec.Struct):
    """A token that may have stood in this place. bytes: of the token, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of a text. top_logprobs: the most probable ones in its place, the first one first."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The tokens of an answer, or those of what is new of it."""

    content: list[TokenLogprob]


class CompletionLogprobs(msgspec.Struct):
    """The tokens of a text side by side. text_offset: the character in which each token begins.

    top_logprobs: the most probable ones and the token itself; null where 0 are asked for.
    """

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class LogprobWish(NamedTuple):
    """That a request asks for log probabilities. top: of so many most probable tokens beside the token itself."""

    pieces: TokenPieces
    top: int

    def places(self) -> TokenPlaces:
        """For one text."""
        return TokenPlaces(self.pieces)


def wished_top(*, wants_logprobs: bool | None, top: int | None) -> int | None:
    """`logprobs` and `top_logprobs` of a chat -> how many; None: none is asked for. Raises InvalidInput."""
    if not wants_logprobs:
        if top is not None:
            raise InvalidInput("top_logprobs: found a number without logprobs. Expected logprobs true beside it")
        return None
    if top is not None and not 0 <= top <= _MOST_TOP:
        raise InvalidInput(f"top_logprobs is {top}. Expected 0 to {_MOST_TOP}")
    return top or 0


def chat_logprobs(wish: LogprobWish, tokens: Sequence[PlacedToken]) -> ChatLogprobs:
    """In the form of chats."""
    return ChatLogprobs([_token(wish, placed) for placed in tokens])


def completion_logprobs(wish: LogprobWish, tokens: Sequence[PlacedToken], offset: int = 0) -> CompletionLogprobs:
    """In the form of completions. offset: characters before the text."""
    pieces = wish.pieces
    names = [shown_bytes(pieces.of(placed.choice.id)) for placed in tokens]
    own = [_finite(placed.choice.logprobs[placed.choice.id]) for placed in tokens]
    top: list[dict[str, float]] | None = None
    if wish.top:
        top = []
        for name, value, placed in zip(names, own, tokens, strict=True):
            found = {shown_bytes(pieces.of(token)): logprob for token, logprob in _most_probable(wish, placed)}
            top.append({**found, name: found.get(name, value)})
    return CompletionLogprobs(names, own, top, [offset + placed.start for placed in tokens])


def _token(wish: LogprobWish, placed: PlacedToken) -> TokenLogprob:
    choice = placed.choice
    one = _top(wish, choice.id, choice.logprobs[choice.id])
    return TokenLogprob(one.token, one.logprob, one.bytes, [_top(wish, *each) for each in _most_probable(wish, placed)])


def _top(wish: LogprobWish, token: int, logprob: float) -> TopLogprob:
    piece = wish.pieces.of(token)
    return TopLogprob(shown_bytes(piece), _finite(logprob), list(piece))


def _most_probable(wish: LogprobWish, placed: PlacedToken) -> list[tuple[int, float]]:
    """(token, its log probability), the first one first."""
    found = sorted(placed.choice.logprobs.items(), key=lambda each: -each[1])[: wish.top]
    return [(token, _finite(logprob)) for token, logprob in found]


def _finite(logprob: float) -> float:
    return max(_LEAST, logprob)
