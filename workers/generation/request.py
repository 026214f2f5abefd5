"""One request of an engine: its sequence in the scheduler, its text, how it ended, and what was delivered of it."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.outputs import CompletionOutput, FinishReason, RequestOutput, Usage
from penstock.workers.generation.sampler import Sampled, SamplingRow
from penstock.workers.generation.scheduler import Sequence
from penstock.workers.generation.text import TextStream, decode

__all__ = ["Delivered", "GenerationRequest"]


@dataclass(frozen=True, slots=True)
class Delivered:
    """What another engine generated and delivered of a request. characters: of its text.

    logprobs: at each token, where the request asks for them.
    """

    token_ids: Tokens[int] = ()
    characters: int = 0
    logprobs: Tokens[dict[int, float]] = ()


@dataclass(slots=True, eq=False)
class GenerationRequest:
    """eos: the tokens that end a text, without those of the parameters. stream: None where text is made at the end."""

    sequence: Sequence
    prompt: str | None
    params: SamplingParams
    seed: int
    eos: frozenset[int]
    tokenizer: Any
    stream: TextStream | None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    _text: str = ""
    _delivered: int = 0
    _is_closed: bool = False
    """Whether the last output was delivered."""

    @property
    def request_id(self) -> str:
        return self.sequence.request_id

    @property
    def token_ids(self) -> Tokens[int]:
        """What was generated."""
        return self.sequence.tokens[self.sequence.num_prompt :]

    @property
    def num_generated(self) -> int:
        return len(self.sequence.tokens) - self.sequence.num_prompt

    @property
    def has_news(self) -> bool:
        """Whether an output would differ from the last one."""
        return self.num_generated > self._delivered or (self.finish_reason is not None and not self._is_closed)

    def sampling_row(self) -> SamplingRow:
        """How the next token is chosen."""
        barred = tuple(self._ending()) if self.num_generated < self.params.min_tokens else ()
        return SamplingRow(self.params, self.seed, len(self.sequence.tokens), barred)

    def accept(self, sampled: Sampled) -> None:
        """The next token was appended to the sequence. Sets `finish_reason` where the text ends."""
        if sampled.logprobs is not None:
            self.logprobs.append(sampled.logprobs)
        token = self.sequence.tokens[-1]
        may_end = self.num_generated >= self.params.min_tokens
        is_end = token in self._ending()
        if self.stream is not None and not (is_end and may_end):
            self.stream.push([token])
        if is_end and may_end:
            self.finish("stop", token)
        elif self.stream is not None and self.stream.stopped_by is not None:
            self.finish("stop", self.stream.stopped_by)
        elif self.num_generated >= self.params.max_tokens:
            self.finish("length")

    def resume(self, delivered: Delivered) -> None:
        """Continue behind what was delivered: outputs have what comes after it. The request may have ended there."""
        for number, token in enumerate(delivered.token_ids):
            self.sequence.tokens.append(token)
            self.accept(Sampled(token, delivered.logprobs[number] if delivered.logprobs else None))
        self._delivered = len(delivered.token_ids)
        if self.stream is not None:
            self.stream.skip(delivered.characters)

    def finish(self, reason: FinishReason, stop_reason: int | str | None = None) -> None:
        """Ends the request. A stop string that only the last incomplete character made visible still cuts."""
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.stream is not None:
            self.stream.finish()
            if self.stream.stopped_by is not None:
                self.finish_reason, self.stop_reason = "stop", self.stream.stopped_by
        elif self.tokenizer is not None:
            ids = self.token_ids
            # The end is no text, also where it is an ordinary token.
            self._text = decode(self.tokenizer, ids[:-1] if isinstance(stop_reason, int) else ids)

    def output(self) -> RequestOutput:
        """The state, and what is new since the last call."""
        is_last = self._is_closed = self.finish_reason is not None
        ids = tuple(self.token_ids)
        delta = "" if self.stream is None else self.stream.take(is_last=is_last)
        new_ids, self._delivered = ids[self._delivered :], len(ids)
        text = self._text if self.stream is None else self.stream.text
        logprobs = tuple(self.logprobs) if self.params.logprobs is not None else None
        completion = CompletionOutput(0, text, ids, self.finish_reason, self.stop_reason, logprobs)
        sequence: Final = self.sequence
        return RequestOutput(
            self.request_id,
            self.prompt,
            tuple(sequence.tokens[: sequence.num_prompt]),
            (completion,),
            is_last,
            Usage(sequence.num_prompt, len(ids), sequence.num_cached),
            delta,
            new_ids,
        )

    def _ending(self) -> frozenset[int]:
        eos = frozenset() if self.params.ignore_eos else self.eos
        return eos.union(self.params.stop_token_ids)
