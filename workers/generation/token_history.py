"""The tokens of one request, counted for its penalties. A function of the tokens alone: a preemption changes nothing.

Importing this module imports NumPy.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

__all__ = ["TokenHistory"]


class TokenHistory:
    """Each token of prompt and output once, with the times that the output has it."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._tokens = np.zeros(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        self._read = 0

    def follow(self, tokens: Sequence[int], num_prompt: int) -> None:
        """tokens: the prompt, then all of the output. Only those that are new since the last call are read."""
        for at in range(self._read, len(tokens)):
            place = self._place(tokens[at])
            if at >= num_prompt:
                self._counts[place] += 1
        self._read = len(tokens)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """(K,): each token once."""
        return self._tokens[: len(self._places)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """(K,): how often the output has each."""
        return self._counts[: len(self._places)]

    def _place(self, token: int) -> int:
        place = self._places.get(token)
        if place is None:
            place = self._places[token] = len(self._places)
            if place == len(self._tokens):
                self._tokens = np.concatenate((self._tokens, np.zeros_like(self._tokens)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._tokens[place] = token
        return place
