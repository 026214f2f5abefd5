"""The steps of an engine: each is planned, then computed at once, or launched while the one before it is not read.

    plan -> launched, then the tokens of the step before -> its requests settled
         -> tokens of the step before, one more layer packed, forwards with samples -> its requests settled

Importing this module imports torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from penstock.workers.generation.config import Config
from penstock.workers.generation.engine_counts import EngineCounts
from penstock.workers.generation.forward_attempts import Attempted, ForwardAttempts
from penstock.workers.generation.forwards import Forwards
from penstock.workers.generation.launched_step import LaunchedStep
from penstock.workers.generation.packing import Packing
from penstock.workers.generation.request import GenerationRequest
from penstock.workers.generation.sampler import Sampled, sample_on_device
from penstock.workers.generation.scheduler import Chunk, Scheduler, StepPlan
from penstock.workers.generation.verification import sampled_tokens
from penstock.workers.runtime.base import DeviceLost
from penstock.workers.runtime.prepacked import PackedFailure

__all__ = ["Steps"]

logger = logging.getLogger("penstock.runtime")
step_logger = logging.getLogger("penstock.runtime.steps")

_MOST_GUESSING: Final = 2
"""Running requests beside which guesses pay on a CPU."""


class Steps:
    """For one thread at a time.

    requests: by id, those that have not ended. settle: called with each request whose tokens were appended to its
    sequence, or whose logits are not finite. fail: called with what was raised for a chunk's request.
    """

    def __init__(
        self,
        config: Config,
        forwards: Forwards,
        scheduler: Scheduler,
        packing: Packing,
        counts: EngineCounts,
        requests: Mapping[str, GenerationRequest],
        *,
        settle: Callable[[GenerationRequest, Chunk, Sequence[Sampled]], None],
        fail: Callable[[Chunk, Exception], None],
    ) -> None:
        self._config: Final = config
        self._forwards: Final = forwards
        self._scheduler: Final = scheduler
        self._packing: Final = packing
        self._counts: Final = counts
        self._requests: Final = requests
        self._settle: Final = settle
        self._fail: Final = fail
        self._attempts: Final = ForwardAttempts(self._forward, config.scheduler.max_num_batched_tokens)
        self._launched: LaunchedStep | None = None
        """The step whose tokens were not read yet."""
        choice = config.async_scheduling
        self.is_async: Final = forwards.decoder.device.is_cuda if choice == "auto" else choice == "on"
        self._preemptions_logged = 0

    def advance(self) -> None:
        """One step, if there is work."""
        launched, self._launched = self._launched, None
        plan = self._scheduler.plan({} if launched else self._guesses())
        if dirty := self._scheduler.take_unverified_pages():
            self._forwards.clear(dirty)
        if self._can_launch(plan, launched):
            self._launched = self._launch(plan.chunks, launched)
        chunks = plan.chunks
        if launched is not None:
            self._read(launched)
            # Some of the requests may have ended with the tokens that were read.
            chunks = tuple(chunk for chunk in chunks if self._is_open(chunk))
        if chunks and self._launched is None:
            self._compute(chunks)

    def _guesses(self) -> dict[str, list[int]]:
        """More rows have enough work for a forward: guesses would take its time from them."""
        most = self._config.scheduler.num_speculative_tokens
        return {request.request_id: request.guess(most) for request in self._guessing()}

    def _guessing(self) -> list[GenerationRequest]:
        """The running requests whose next tokens may be guessed."""
        running = self._scheduler.running
        if not self._config.scheduler.num_speculative_tokens or len(running) > _MOST_GUESSING:
            return []
        return [request for each in running if (request := self._requests[each.request_id]).can_guess]

    def _compute(self, chunks: Sequence[Chunk]) -> None:
        self._packing.pack_next()
        try:
            attempted = self._attempts.run(chunks)
        except BaseException:
            self._scheduler.disturb(chunks)
            raise
        self._record(attempted)
        for chunk, error in attempted.failed:
            self._scheduler.disturb([chunk])
            self._fail(chunk, error)
        self._log_step(attempted.computed, len(attempted.failed))

    # A step that is launched before the tokens of the last one are read

    def _can_launch(self, plan: StepPlan, launched: LaunchedStep | None) -> bool:
        """Whether each row decodes one token, and needs nothing from the host but its place.

        A few greedy rows are guessed instead, which needs their tokens. A request that lost its pages, and is in the
        plan again, waits until its last token is read.
        """
        if not self.is_async or not plan.chunks or self._attempts.is_limited:
            return False
        if self._guessing():
            return False
        ahead = 0 if launched is None else 1
        return all(
            chunk.num_tokens == 1
            and chunk.start >= chunk.sequence.num_prompt
            and chunk.samples
            and chunk.sequence.num_ahead == ahead
            and self._requests[chunk.sequence.request_id].is_free_of_host
            for chunk in plan.chunks
        )

    def _launch(self, chunks: Sequence[Chunk], launched: LaunchedStep | None) -> LaunchedStep | None:
        """None where it fails: the step is computed chunk by chunk then, by which the chunk at fault is found."""
        try:
            with self._forwards.decoder.device.inference():
                logits, sampling = self._forwards.logits(chunks, launched)
                requests = [self._requests[chunk.sequence.request_id] for chunk in sampling]
                rows = []
                if not all(request.params.is_greedy for request in requests):
                    rows = [request.sampling_row(request.sequence.num_ahead) for request in requests]
                sampled = sample_on_device(logits, rows)
                step = LaunchedStep(sampling, sampled, self._forwards.decoder.device)
        except DeviceLost:
            raise
        except Exception:  # a model may raise anything
            logger.warning("a step could not be launched and is computed in parts", exc_info=True)
            self._scheduler.disturb(chunks)
            return None
        self._scheduler.launch(sampling)
        return step

    def _read(self, launched: LaunchedStep) -> None:
        """The tokens of a launched step. Requests that have ended meanwhile have no use for theirs."""
        with self._forwards.decoder.device.inference():
            tokens, is_finite = launched.read()
        self._counts.step(launched.chunks, self._scheduler.pages.num_used)
        for chunk, token, is_known in zip(launched.chunks, tokens, is_finite, strict=True):
            if not self._is_open(chunk):
                continue
            if is_known:
                self._scheduler.confirm(chunk, token)
            try:
                request = self._requests[chunk.sequence.request_id]
                self._settle(request, chunk, [Sampled(token if is_known else None)])
            except Exception as error:  # a tokenizer may raise anything; only this request fails
                self._fail(chunk, error)
        self._log_step(launched.chunks)

    def _log_step(self, computed: Sequence[Chunk], num_failed: int = 0) -> None:
        """A line for a step whose tokens are known, with the preemptions since the last line."""
        if not step_logger.isEnabledFor(logging.DEBUG):
            return
        preemptions = self._scheduler.num_preemptions
        preempted, self._preemptions_logged = preemptions - self._preemptions_logged, preemptions
        facts = {
            "step": self._counts.steps,
            "rows": len(computed),
            "tokens": sum(chunk.num_tokens for chunk in computed),
            "failed": num_failed,
            "preempted": preempted,
            "running": len(self._scheduler.running),
            "waiting": len(self._scheduler.waiting),
            "pages_used": self._scheduler.pages.num_used,
        }
        step_logger.debug("a step of generation", extra=facts)

    def _is_open(self, chunk: Chunk) -> bool:
        """Whether the request goes on. Another one may have its id by now."""
        request = self._requests.get(chunk.sequence.request_id)
        return request is not None and request.sequence is chunk.sequence

    def _forward(self, chunks: Sequence[Chunk]) -> dict[str, list[Sampled]]:
        try:
            return self._sampled(chunks)
        except PackedFailure as failure:
            self._packing.give_up(failure)
        return self._sampled(chunks)

    def _sampled(self, chunks: Sequence[Chunk]) -> dict[str, list[Sampled]]:
        with self._forwards.decoder.device.inference():
            logits, sampling = self._forwards.logits(chunks)
            return sampled_tokens(logits, sampling, self._requests)

    def _record(self, attempted: Attempted) -> None:
        found = attempted.found
        tokens = {name: [one.token for one in each if one.token is not None] for name, each in found.items()}
        self._counts.step(attempted.computed, self._scheduler.pages.num_used)
        self._scheduler.record(
            attempted.computed,
            {name: each[-1] for name, each in tokens.items() if each},
            {name: each[:-1] for name, each in tokens.items()},
        )
        for chunk in attempted.computed:
            name = chunk.sequence.request_id
            # The texts of one request end together where one of them fails.
            if name in found and (request := self._requests.get(name)) is not None:
                try:
                    self._settle(request, chunk, found[name])
                except Exception as error:  # a tokenizer may raise anything; only this request fails
                    self._fail(chunk, error)
