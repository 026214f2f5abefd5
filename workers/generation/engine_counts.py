"""What an engine counts from step to step. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.workers.generation.scheduler import Chunk

__all__ = ["EngineCounts"]


@dataclass(slots=True)
class EngineCounts:
    """Since the engine was made. rows: chunks of all steps. pages_peak: the most pages that were in use at a time."""

    requests_finished: int = 0
    steps: int = 0
    rows: int = 0
    pages_peak: int = 0
    prompt_tokens: int = 0
    generated: int = 0
    drafts: int = 0
    drafts_accepted: int = 0

    def step(self, chunks: Sequence[Chunk], pages_used: int) -> None:
        """These chunks were computed."""
        self.steps += 1
        self.rows += len(chunks)
        self.pages_peak = max(self.pages_peak, pages_used)
        for chunk in chunks:
            # Of a decoding request, no token is one of the prompt.
            if (left := chunk.sequence.num_prompt - chunk.start) > 0:
                self.prompt_tokens += min(chunk.num_tokens, left)
