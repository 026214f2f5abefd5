"""Texts in the cache: which ones it has, and how a job ends that gets one.

    job    --> may_share_text: greedy or seeded --> it has a key, like the jobs of other models
    answer --> is_whole: the text ended itself  --> it is kept
    found  --> CachedTexts.write: one chunk     --> the job ends, as any other with a cached answer
               of a text that another worker has begun: the rest of it

Equal jobs that are here at the same time are not joined: each of them streams.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Final

from penstock.registry.broker.base import StreamEntry
from penstock.registry.envelope import Keyring
from penstock.registry.errors import BrokerUnavailable, Corrupt, InvalidInput
from penstock.registry.event_body import MAX_CHUNK_BYTES, EventPart, chunk_part
from penstock.registry.generation_inputs import is_deterministic, read_params
from penstock.registry.tensors import Array, decode
from penstock.workers.generation.chunks import CONTENT, beginning, chunk_of
from penstock.workers.job import ClaimedJob
from penstock.workers.results import EncodedOutputs, JobOutcome
from penstock.workers.streaming import EventWriter, Outbox
from penstock.workers.streaming.delivered import delivered_chunks

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

    read: the entries of the event stream of a job, by its id. max_bytes: of the events of one job that the broker
    keeps. now_ms: milliseconds by the broker's clock.
    """

    def __init__(
        self,
        events: EventWriter,
        keyring: Keyring,
        read: Callable[[str], list[StreamEntry]],
        *,
        max_bytes: int,
        now_ms: Callable[[], float],
    ) -> None:
        self._events = events
        self._keyring = keyring
        self._read = read
        self._max_bytes = max_bytes
        self._now_ms = now_ms
        self._outboxes: dict[ClaimedJob, Outbox] = {}
        """Of jobs whose events the broker may lack."""

    def write(self, outcomes: Sequence[JobOutcome]) -> None:
        """Write a chunk with the text for each job; a job with several texts has none, as when it runs.

        If an earlier run has sent the beginning of this text, the chunk continues it, as a text that is written does:
        subscribers see no reset. A text that is too large for one event comes with the end of its job only. Raises
        BrokerUnavailable: a later call with the same outcomes writes what is left.
        """
        for outcome in outcomes:
            if outcome.job not in self._outboxes and (found := self._chunk(outcome)) is not None:
                outbox = Outbox(outcome.job, self._events.name_run(), self._keyring, self._max_bytes)
                part, outbox.resumes = found
                outbox.add(part)
                self._outboxes[outcome.job] = outbox
        self._events.write_now(self._outboxes.values())
        for job, outbox in self._outboxes.items():
            if outbox.error is not None:
                # The result has the text as well.
                facts = {"job_id": job.header.id, "model": job.header.model, "error": type(outbox.error).__name__}
                logger.warning("the chunk of a cached text was not written", extra=facts)
        self._outboxes.clear()

    def _chunk(self, outcome: JobOutcome) -> tuple[EventPart, bool] | None:
        """The chunk that subscribers lack, and whether it continues a text; None: they lack none."""
        job, answer = outcome.job, outcome.answer
        if not isinstance(answer, EncodedOutputs):
            return None
        try:
            if read_params(job.inputs).num_candidates > 1:
                return None
            outputs = decode(answer.content, answer.body)
            text, tokens, logprobs = str(outputs["text"][0]), outputs["token_ids"][0], str(outputs["logprobs"][0])
            begins_with = beginning(answer.content_hash, int(self._now_ms()))
            if sent := self._sent(job, answer.content_hash, text, tokens):
                text, tokens, begins_with = text[sent[0] :], tokens[sent[1] :], {}
                logprobs = json.dumps(json.loads(logprobs)[sent[1] :]) if logprobs else ""
            if not (text or len(tokens)):
                return None
            chunk = chunk_of(text, tokens, logprobs or None)
            part = chunk_part({**chunk, **begins_with}, None, min(self._max_bytes, MAX_CHUNK_BYTES))
            return part, sent is not None
        except (Corrupt, InvalidInput):
            return None

    def _sent(self, job: ClaimedJob, content_hash: str, text: str, tokens: Array) -> tuple[int, int] | None:
        """Characters and tokens of this text that an earlier run has sent; None: none, or those of another text."""
        try:
            chunks = delivered_chunks(self._read(job.header.id), job, self._keyring)
        except BrokerUnavailable:
            raise
        except Exception:  # whatever the broker holds in place of the job's events, the write meets it again
            return None
        if not chunks or CONTENT not in chunks[0] or str(chunks[0][CONTENT]) != content_hash:
            return None
        sent = "".join(str(chunk["text"]) for chunk in chunks)
        ids = [token for chunk in chunks for token in chunk["token_ids"].tolist()]
        begins = text.startswith(sent) and tokens[: len(ids)].tolist() == ids
        return (len(sent), len(ids)) if begins else None
