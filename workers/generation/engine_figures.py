"""The counts of an engine as workers and monitors report them.

Importing this module imports no torch.
"""

from __future__ import annotations

from penstock.workers.generation.outputs import EngineStats
from penstock.workers.observe.metrics import GenerationFigures

__all__ = ["figures_of"]


def figures_of(stats: EngineStats, seats: int) -> GenerationFigures:
    """The counts of an engine as they are reported, without times. seats: rows of a step at most."""
    return GenerationFigures(
        waiting=stats.waiting,
        running=stats.running,
        preempted=stats.preemptions,
        prompt_tokens=stats.prompt_tokens_computed,
        generated_tokens=stats.tokens_generated,
        steps=stats.steps,
        rows=stats.rows,
        pages_used=stats.pages_used,
        pages_peak=stats.pages_peak,
        pages_cached=stats.pages_cached,
        pages=stats.pages_total,
        prefix_queried=stats.prefix_tokens_queried,
        prefix_found=stats.prefix_tokens_found,
        drafted=stats.draft_tokens,
        drafts_accepted=stats.draft_tokens_accepted,
        seats=seats,
        compute_s=0.0,
        step_s=None,
        seat_s=None,
        text_s=None,
        first_token_s=(),
        inter_token_s=(),
    )
