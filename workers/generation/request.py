"""One text that is generated: its sequence in the scheduler, how its tokens are chosen, how it ended.

    sampling_row -> sampler -> accept -> text, end -> delta, completion

The texts of one request with n > 1 are siblings: each has its own sequence, seed and end. See `text_group`.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any

import torch

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.backend import Delivered
from penstock.workers.generation.outputs import CompletionOutput, Delta, FinishReason
from penstock.workers.generation.sampler import Sampled, logprobs_at
from penstock.workers.generation.sampling_row import SamplingRow
from penstock.workers.generation.scheduler import Sequence
from penstock.workers.generation.speculation import PromptLookup
from penstock.workers.generation.structure import TextMatcher
from penstock.workers.generation.text import TextStream, decode
from penstock.workers.generation.token_history import TokenHistory

__all__ = ["GenerationRequest", "TokenRules"]


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which tokens may come, as far as that is the same for all texts of a request.

    ending: the tokens that end a text. bad_words: token by token. forbidden: (V,) bool, or None.
    """

    ending: frozenset[int]
    bad_words: Tokens[Tokens[int]] = ()
    forbidden: torch.Tensor | None = None


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """stream: None where text is made at the end. matcher: of the form that the text must have."""

    sequence: Sequence
    prompt: str | None
    params: SamplingParams
    seed: int
    rules: TokenRules
    tokenizer: Any
    stream: TextStream | None
    matcher: TextMatcher | None = None
    is_free_of_host: bool = False
    """Whether its tokens can be chosen on the device alone."""
    siblings: list[GenerationRequest] = field(default_factory=list)
    """The other texts of the request: the first text has them."""
    elder: GenerationRequest | None = None
    """The first text, for its siblings."""
    deadline_s: float | None = None
    """When its `timeout_s` has passed."""
    expires_s: float | None = None
    """When the deadline of its job passes."""
    finish_reason: FinishReason | None = None
    failure: Exception | None = None
    """What the model, its tokenizer or a form raised for one of the texts: the first text has it."""
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, float] | None] = field(default_factory=list)
    is_closed: bool = False
    """Whether the last output was delivered."""
    logprob_sum: float = 0.0
    _lookup: PromptLookup = field(default_factory=PromptLookup)
    _history: TokenHistory = field(default_factory=TokenHistory)
    _text: str = ""
    _delivered: int = 0
    _prompt_token_ids: tuple[int, ...] = ()

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """Copied once: each output has them, and a prompt may be long."""
        if not self._prompt_token_ids:
            self._prompt_token_ids = tuple(self.sequence.tokens[: self.sequence.num_prompt])
        return self._prompt_token_ids

    @property
    def first(self) -> GenerationRequest:
        """The first text of the request."""
        return self if self.elder is None else self.elder

    @property
    def token_ids(self) -> Tokens[int]:
        """What was generated."""
        return self.sequence.tokens[self.sequence.num_prompt :]

    @property
    def num_generated(self) -> int:
        return len(self.sequence.tokens) - self.sequence.num_prompt

    @property
    def has_begun(self) -> bool:
        """Whether anything of it was computed, here or in another engine."""
        sequence = self.sequence
        return self.num_generated > 0 or sequence.num_computed > 0 or sequence.num_preempted > 0

    @property
    def has_own_news(self) -> bool:
        """Whether this text has more tokens than were delivered, or an end that was not."""
        return self.num_generated > self._delivered or (self.finish_reason is not None and not self.is_closed)

    # How tokens are chosen

    def sampling_row(self, ahead: int = 0) -> SamplingRow:
        """How the next token is chosen, or that behind so many drafts."""
        params = self.params
        history, forbidden = None, self.rules.forbidden
        if params.has_penalties:
            history = self._history
            history.follow(self.sequence.tokens, self.sequence.num_prompt)
        if self.matcher is not None:
            self.matcher.follow(self.token_ids)
            forbidden = self.matcher.forbidden()
        logprobs = 0 if params.logprobs is None and params.num_candidates > params.n else params.logprobs
        position = len(self.sequence.tokens) + ahead
        return SamplingRow(params, self.seed, position, self._barred(ahead), forbidden, history, logprobs)

    @property
    def can_guess(self) -> bool:
        """Whether guesses can be checked together, and pay: a row must not depend on those before it."""
        params = self.params
        if not params.is_greedy or params.has_penalties or self.matcher is not None or self.rules.bad_words:
            return False
        return self._lookup.is_on

    def guess(self, most: int) -> list[int]:
        """Tokens that may come next; none where `can_guess` is false."""
        if not self.can_guess:
            return []
        return self._lookup.guess(self.sequence.tokens, min(most, self.params.max_tokens - self.num_generated - 1))

    def ends_with(self, token: int, ahead: int = 0) -> bool:
        """Whether the token ends the text behind so many drafts."""
        return self.num_generated + ahead + 1 >= self.params.min_tokens and token in self.rules.ending

    def _barred(self, ahead: int) -> Tokens[int]:
        if not (self.params.min_tokens or self.rules.bad_words):
            return ()
        barred = list(self.rules.ending) if self.num_generated + ahead < self.params.min_tokens else []
        for word in self.rules.bad_words:
            before = len(word) - 1
            if not before or self.sequence.tokens[-before:] == list(word[:-1]):
                barred.append(word[-1])
        return barred

    # What was chosen

    def add_prompt_logits(self, start: int, logits: torch.Tensor) -> None:
        """logits: (T, V) of the tokens from `start` on. Those that are known from before a preemption are left out."""
        if not self.prompt_logprobs:
            self.prompt_logprobs.append(None)
        number = self.params.prompt_logprobs or 0
        for at in range(
            max(start, len(self.prompt_logprobs) - 1), min(start + len(logits), self.sequence.num_prompt - 1)
        ):
            self.prompt_logprobs.append(logprobs_at(logits[at - start], self.sequence.tokens[at + 1], number))

    def accept(self, sampled: Tokens[Sampled], guessed: int = 0) -> int:
        """These tokens were appended to the sequence. Sets `finish_reason` where the text ends, and drops what follows.

        guessed: the drafts that were checked. Returns how many tokens the text has more.
        """
        if guessed:
            self._lookup.record(guessed, len(sampled) - 1)
        tokens = self.sequence.tokens
        first = len(tokens) - len(sampled)
        for number, one in enumerate(sampled, 1):
            self._accept(one, first + number)
            if self.finish_reason is not None:
                return number
        return len(sampled)

    def _accept(self, one: Sampled, end: int) -> None:
        token = self.sequence.tokens[end - 1]
        if one.logprobs is not None:
            self.logprobs.append(one.logprobs)
            self.logprob_sum += one.logprobs[token]
        number = end - self.sequence.num_prompt
        is_end = number >= self.params.min_tokens and token in self.rules.ending
        if self.stream is not None and not is_end:
            self.stream.push([token], may_stop=number > self.params.min_tokens)
        if self.matcher is not None:
            self.matcher.follow(self.token_ids)
        reason: FinishReason | None = None
        stop_reason: int | str | None = None
        if self.matcher is not None and self.matcher.is_broken:
            # A form beyond the limits of its compiler leaves the end as the only token: the text is not complete.
            reason, self.first.failure = "error", self.matcher.failure
        elif is_end:
            reason, stop_reason = "stop", token
        elif self.matcher is not None and self.matcher.is_complete:
            reason = "stop"
        elif self.stream is not None and self.stream.stopped_by is not None:
            reason, stop_reason = "stop", self.stream.stopped_by
        elif number >= self.params.max_tokens:
            reason = "length"
        if reason is not None:
            del self.sequence.tokens[end:]
            self.finish(reason, stop_reason)

    def resume(self, delivered: Delivered) -> None:
        """Continue behind what was delivered: outputs have what comes after it. The request may have ended there."""
        for number, token in enumerate(delivered.token_ids):
            self.sequence.tokens.append(token)
            self.accept([Sampled(token, delivered.logprobs[number] if delivered.logprobs else None)])
            if self.finish_reason is not None:
                break
        self._delivered = len(delivered.token_ids)
        if self.deadline_s is not None:
            self.deadline_s -= delivered.elapsed_s
        if self.stream is not None:
            self.stream.skip(len(delivered.text))

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends the text. A stop string that only the last incomplete character made visible still cuts.

        It does not raise: a text that cannot be decoded has ended, too, with that error.
        """
        self.finish_reason, self.stop_reason = reason, stop_reason
        try:
            self._finish_text(stop_reason)
        except Exception as error:  # a tokenizer may raise anything
            if reason not in ("abort", "error"):
                self.finish_reason, self.stop_reason, self.first.failure = "error", None, error

    def _finish_text(self, stop_reason: int | str | None) -> None:
        if self.stream is not None:
            self.stream.finish()
            if self.stream.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", self.stream.stopped_by
        elif self.tokenizer is not None:
            ids = self.token_ids
            # The end is no text, also where it is an ordinary token.
            self._text = decode(self.tokenizer, ids[:-1] if isinstance(stop_reason, int) else ids)

    def completion(self, index: int) -> CompletionOutput:
        """The text so far, as the output of this number."""
        text = self._text if self.stream is None else self.stream.text
        logprobs = tuple(self.logprobs) if self.params.logprobs is not None else None
        return CompletionOutput(index, text, tuple(self.token_ids), self.finish_reason, self.stop_reason, logprobs)

    def take_delta(self) -> Delta:
        """What is new since the last call."""
        is_last = self.is_closed = self.finish_reason is not None
        text = "" if self.stream is None else self.stream.take(is_last=is_last)
        new_ids = tuple(self.sequence.tokens[self.sequence.num_prompt + self._delivered :])
        self._delivered += len(new_ids)
        return Delta(text, new_ids)
