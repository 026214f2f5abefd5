"""Texts in the cache: which ones it has, and how a job ends that gets one.

    job    --> may_share_text: greedy or seeded --> it has a key, like the jobs of other models
    answer --> is_whole: the text ended itself  --> it is kept
    found  --> CachedTexts.write: one chunk     --> the job ends, as any other with a cached answer

Equal jobs that are here at the same time are not joined: each of them streams.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Final

from penstock.registry.envelope import Keyring
from penstock.registry.errors import Corrupt, InvalidInput
from penstock.registry.event_body import MAX_CHUNK_BYTES, EventPart, chunk_part
from penstock.registry.generation_inputs import is_deterministic, read_params
from penstock.registry.tensors import decode
from penstock.workers.generation.chunks import beginning, chunk_of
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs, JobOutcome
from penstock.workers.streaming import EventWriter, Outbox

__all__ = ["CachedTexts", "is_whole", "may_share_text"]

_WHOLE: Final = frozenset(["length", "stop", "tool_calls"])
"""The ends of texts that an equal request would have, too."""

logger = logging.getLogger("penstock.server")


def may_share_text(job: ClaimedJob) -> bool:
    """Whether the text of this job may be that of an equal one. A chunk is made from all outputs."""
    return not job.header.options.outputs and is_deterministic(job.inputs)


def is_whole(answer: EncodedOutputs) -> bool:
    """Whether each text of an answer ended by itself, and not for want of time."""
    reasons = decode(answer.content, answer.body).get("finish_reason")
    return reasons is not None and _WHOLE.issuperset(reasons.tolist())


class CachedTexts:
    """Sends cached texts to the subscribers of their jobs. The I/O thread owns it.

    max_bytes: of the events of one job that the broker keeps. now_ms: milliseconds by the broker's clock.
    """

    def __init__(self, events: EventWriter, keyring: Keyring, *, max_bytes: int, now_ms: Callable[[], float]) -> None:
        self._events = events
        self._keyring = keyring
        self._max_bytes = max_bytes
        self._now_ms = now_ms
        self._outboxes: dict[ClaimedJob, Outbox] = {}
        """Of jobs whose events the broker may lack."""

    def write(self, outcomes: Sequence[JobOutcome]) -> None:
        """Write a chunk with the whole text for each job; a job with several texts has none, as when it runs.

        A text that is too large for one event comes with the end of its job only. Raises BrokerUnavailable: a later
        call with the same outcomes writes what is left.
        """
        for outcome in outcomes:
            if outcome.job not in self._outboxes and (part := self._chunk(outcome)) is not None:
                outbox = Outbox(outcome.job, self._events.name_run(), self._keyring, self._max_bytes)
                outbox.add(part)
                self._outboxes[outcome.job] = outbox
        self._events.write_now(self._outboxes.values())
        for job, outbox in self._outboxes.items():
            if outbox.error is not None:
                # The result has the text as well.
                facts = {"job_id": job.header.id, "model": job.header.model, "error": type(outbox.error).__name__}
                logger.warning("the chunk of a cached text was not written", extra=facts)
        self._outboxes.clear()

    def _chunk(self, outcome: JobOutcome) -> EventPart | None:
        job, answer = outcome.job, outcome.answer
        if not isinstance(answer, EncodedOutputs):
            return None
        try:
            if read_params(job.inputs).num_candidates > 1:
                return None
            outputs = decode(answer.content, answer.body)
            text, tokens = str(outputs["text"][0]), outputs["token_ids"][0]
            if not (text or len(tokens)):
                return None
            chunk = chunk_of(text, tokens, str(outputs["logprobs"][0]) or None)
            begun = beginning(answer.content_hash, int(self._now_ms()))
            return chunk_part({**chunk, **begun}, None, min(self._max_bytes, MAX_CHUNK_BYTES))
        except (Corrupt, InvalidInput):
            return None
