"""The text so far -> guesses of the next tokens, which one forward checks together. Pure.

    last three tokens -> their last place before -> the tokens that followed there

After Saxena 2023, prompt lookup decoding. A greedy request takes a guess only where it is the token that it would have
chosen, so guesses change no text. A request whose guesses are mostly wrong gets no more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

__all__ = ["PromptLookup"]

_GRAM: Final = 3
_LEAST_ACCEPTANCE: Final = 0.4
_WEIGHT: Final = 0.2
"""Of the last guess in the moving acceptance."""


class PromptLookup:
    """The guesses of one request."""

    def __init__(self) -> None:
        self.acceptance = 1.0
        """The moving share of guesses that were right."""
        self._places: dict[tuple[int, ...], int] = {}
        self._read = _GRAM

    @property
    def is_on(self) -> bool:
        """Whether enough of the guesses were right."""
        return self.acceptance >= _LEAST_ACCEPTANCE

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most so many tokens that may follow. tokens: prompt and output; they only grow from call to call."""
        if not self.is_on or most < 1:
            return []
        for at in range(self._read, len(tokens)):
            self._places[tuple(tokens[at - _GRAM : at])] = at
        self._read = max(self._read, len(tokens))
        place = self._places.get(tuple(tokens[-_GRAM:]))
        if place is None:
            return []
        period = len(tokens) - place
        # Near the end the text goes on with its own guess: a short period is repeated.
        return [tokens[place + number % period] for number in range(most)]

    def record(self, guessed: int, accepted: int) -> None:
        """So many tokens were guessed, and so many of them were right."""
        self.acceptance += _WEIGHT * (accepted / guessed - self.acceptance)
