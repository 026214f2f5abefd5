"""A prompt -> its tokens, checked. A prompt that is too long is refused by its length or its beginning.

    messages -> template -> text -> tokens of its beginning, where it is long -> tokens of all
    token ids -> their number -> each of them

Any thread may call: a prompt of megabytes is read beside the steps of others. Fast tokenizers release the lock of
Python.

Importing this module imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from penstock.registry.errors import InvalidInput, described
from penstock.workers.generation.chat import ChatPrompt, chat_prompt, parser_of

__all__ = ["Prompt", "PromptReader", "TooManyTokens"]

Prompt = str | Sequence[int]
"""A text, or its token ids."""
_CHARACTERS: Final = 8
"""For each token that is allowed, in the first beginning of a text that is read: most texts have half as many."""
_GROWTH: Final = 4
"""Of the beginnings. All of them together take a third of the time of the whole text."""
_SLACK: Final = 16
"""Tokens at the end of a beginning that the rest of the text may change."""


class TooManyTokens(InvalidInput):
    """There is no room for the prompt and its text here. num_tokens: of both together, at least."""

    def __init__(self, message: str, num_tokens: int) -> None:
        super().__init__(message)
        self.num_tokens = num_tokens


class PromptReader:
    """The tokens of prompts for one model. max_positions: of a prompt and its text together."""

    def __init__(self, tokenizer: Any, vocab_size: int, max_positions: int) -> None:
        self._tokenizer: Final = tokenizer
        self._vocab_size: Final = vocab_size
        self._max_positions: Final = max_positions
        if tokenizer is not None:
            # The first call may end the padding of the folder. Later ones change nothing, so threads may share it.
            tokenizer("")

    def tokens(self, prompt: Prompt | ChatPrompt, max_tokens: int) -> list[int]:
        """max_tokens: of the text that follows. Raises InvalidInput for a prompt that is wrong or too long."""
        if isinstance(prompt, ChatPrompt):
            text = chat_prompt(self._tokenizer, prompt.messages, prompt.tools, prompt.template)
            parser_of(self._tokenizer, prompt)
            # The template writes the beginning of a text itself, so nothing is added to it.
            tokens = self._of_text(text, max_tokens, adds_special=False)
        elif isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidInput("Found a text for a model without a tokenizer, expected token ids")
            tokens = self._of_text(prompt, max_tokens, adds_special=True)
        else:
            self._check_length(len(prompt), max_tokens, "")
            tokens = list(prompt)
        self._check_length(len(tokens), max_tokens, "")
        self._check_tokens(tokens)
        return tokens

    def _of_text(self, text: str, max_tokens: int, *, adds_special: bool) -> list[int]:
        for beginning in _beginnings(text, _CHARACTERS * max(1, self._max_positions - max_tokens)):
            number = len(self._tokenizer(beginning, add_special_tokens=adds_special)["input_ids"])
            self._check_length(max(1, number - _SLACK), max_tokens, "at least ")
        return list(self._tokenizer(text, add_special_tokens=adds_special)["input_ids"])

    def _check_length(self, number: int, max_tokens: int, at_least: str) -> None:
        if number + max_tokens > self._max_positions:
            raise TooManyTokens(
                f"Found a prompt of {at_least}{number} tokens and max_tokens {max_tokens}, expected at most "
                f"{self._max_positions} together (max_model_len)",
                number + max_tokens,
            )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens:
            raise InvalidInput("Found an empty prompt, expected at least one token")
        most = self._vocab_size
        for token in tokens:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < most:
                raise InvalidInput(f"Found {described(token)} as a token, expected integers from 0 to {most - 1}")


def _beginnings(text: str, length: int) -> Iterator[str]:
    """Shorter parts of a text, each longer than the one before. They end before a space, where that is near."""
    while length < len(text):
        end = text.rfind(" ", length // 2, length)
        yield text[: length if end < 0 else end]
        length *= _GROWTH
