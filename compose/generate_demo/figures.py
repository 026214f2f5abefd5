"""What a run of texts took: times at the client, counts of the engine -> the closing table.

TextRun of each text (times of its chunks) --> tokens/s, time to first token, time between tokens
report of the worker, before and after     --> rows of a step, prefix cache, pages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from rich.table import Table

__all__ = ["EngineCounts", "RunFigures", "TextRun", "draw", "figures_of"]


@dataclass(slots=True)
class TextRun:
    """One text, as its reader saw it. Times are monotonic seconds."""

    submitted_at: float
    chunks: list[tuple[float, int]] = field(default_factory=list)
    """When each chunk came, and its tokens."""

    @property
    def tokens(self) -> int:
        return sum(number for _, number in self.chunks)

    @property
    def first_token_s(self) -> float:
        return self.chunks[0][0] - self.submitted_at

    @property
    def inter_token_s(self) -> list[float]:
        """A time for each token behind the first chunk. Tokens of one chunk share its time."""
        times: list[float] = []
        for (before, _), (at, number) in zip(self.chunks, self.chunks[1:], strict=False):
            times += [(at - before) / number] * number
        return times


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What the engine has counted between two reports. pages_peak: since it was loaded."""

    steps: int
    rows: int
    prefix_found: int
    prefix_queried: int
    pages_peak: int
    pages: int

    @classmethod
    def between(cls, before: Mapping[str, Any], after: Mapping[str, Any]) -> EngineCounts:
        """Of two entries of the same engine in the reports of its worker."""
        grown = {name: after[name] - before[name] for name in ("steps", "rows", "prefix_found", "prefix_queried")}
        return cls(**grown, pages_peak=after["pages_peak"], pages=after["pages"])


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Of some texts that were written at once. alone_tokens_per_s: of one text, before them."""

    texts: int
    tokens: int
    seconds: float
    tokens_per_s: float
    alone_tokens_per_s: float
    first_token_p50_ms: float
    inter_token_p50_ms: float
    inter_token_p99_ms: float
    rows_per_step: float
    prefix_found: int
    prefix_queried: int
    pages_peak: int
    pages: int

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def figures_of(alone: TextRun, runs: Sequence[TextRun], counts: EngineCounts) -> RunFigures:
    """alone: a text that was written before the others. Each run has a chunk."""
    seconds = max(run.chunks[-1][0] for run in runs) - min(run.submitted_at for run in runs)
    tokens = sum(run.tokens for run in runs)
    between = [each for run in runs for each in run.inter_token_s] or [0.0]
    p50, p99 = np.percentile(between, (50, 99)) * 1e3
    return RunFigures(
        texts=len(runs),
        tokens=tokens,
        seconds=round(seconds, 3),
        tokens_per_s=round(tokens / seconds, 1),
        alone_tokens_per_s=round(alone.tokens / (alone.chunks[-1][0] - alone.submitted_at), 1),
        first_token_p50_ms=round(float(np.median([run.first_token_s for run in runs])) * 1e3, 1),
        inter_token_p50_ms=round(float(p50), 2),
        inter_token_p99_ms=round(float(p99), 2),
        rows_per_step=round(counts.rows / max(1, counts.steps), 2),
        prefix_found=counts.prefix_found,
        prefix_queried=counts.prefix_queried,
        pages_peak=counts.pages_peak,
        pages=counts.pages,
    )


def draw(found: RunFigures) -> Table:
    """One row for each figure, with what it means."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("measured")
    table.add_column("", justify="right")
    table.add_column("")
    for row in (
        (
            "tokens/s",
            f"{found.tokens_per_s:,.0f}",
            f"{found.tokens:,} tokens of {found.texts} texts in {found.seconds:.2f} s",
        ),
        ("tokens/s, one text alone", f"{found.alone_tokens_per_s:,.0f}", "before the others"),
        ("time to first token, p50", f"{found.first_token_p50_ms:,.1f} ms", "from submit, through Redis"),
        ("inter-token, p50", f"{found.inter_token_p50_ms:,.2f} ms", "tokens of one chunk share its time"),
        ("inter-token, p99", f"{found.inter_token_p99_ms:,.2f} ms", ""),
        ("batch", f"{found.rows_per_step:.1f} rows", "texts in a step, as a mean"),
        (
            "prefix-cache hits",
            f"{found.prefix_found:,} tokens",
            f"of {found.prefix_queried:,} tokens of prompts: not computed again",
        ),
        ("pages used", f"{found.pages_peak:,}", f"at most at a time, of {found.pages:,}; 16 tokens each"),
    ):
        table.add_row(*row)
    return table
