"""How much is run: three sizes of the same benchmark."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FULL", "QUICK", "SMOKE", "Scale"]


@dataclass(frozen=True, slots=True)
class Scale:
    """`*_jobs` are per run, `rounds` is how often the contenders take turns."""

    rounds: int
    jobs: int
    celery_jobs: int
    http_jobs: int
    batch_lines: int
    alone_jobs: int
    backlog_jobs: int
    urgent_jobs: int
    encoder_s: float
    """Seconds that one in-process run of the encoder should take."""
    sleeper_jobs: int
    stored_jobs: int
    retention_jobs: int
    retention_ttl_s: int
    step_s: float
    """How long a step of load lasts."""
    promotions: int
    """Changes of one model that each of 20 processes tries."""
    swaps: int
    """A promotion and the way back."""
    subscribers: int
    """Idle event streams of one gateway."""
    experiments: int
    """Simulated A/B experiments of each kind."""


FULL: Final = Scale(
    rounds=3,
    jobs=20_000,
    celery_jobs=2_000,
    http_jobs=4_000,
    batch_lines=50_000,
    alone_jobs=400,
    backlog_jobs=20_000,
    urgent_jobs=20,
    encoder_s=4.0,
    sleeper_jobs=8_192,
    stored_jobs=20_000,
    retention_jobs=100_000,
    retention_ttl_s=2,
    step_s=15.0,
    promotions=200,
    swaps=5,
    subscribers=2_000,
    experiments=10_000,
)
QUICK: Final = Scale(
    rounds=2,
    jobs=6_000,
    celery_jobs=400,
    http_jobs=1_000,
    batch_lines=10_000,
    alone_jobs=200,
    backlog_jobs=5_000,
    urgent_jobs=10,
    encoder_s=2.0,
    sleeper_jobs=4_096,
    stored_jobs=5_000,
    retention_jobs=30_000,
    retention_ttl_s=1,
    step_s=8.0,
    promotions=20,
    swaps=2,
    subscribers=2_000,
    experiments=2_000,
)
SMOKE: Final = Scale(
    rounds=1,
    jobs=300,
    celery_jobs=20,
    http_jobs=64,
    batch_lines=300,
    alone_jobs=10,
    backlog_jobs=3_000,
    urgent_jobs=2,
    encoder_s=0.1,
    sleeper_jobs=512,
    stored_jobs=200,
    retention_jobs=1_280,
    retention_ttl_s=1,
    step_s=1.5,
    promotions=2,
    swaps=1,
    subscribers=50,
    experiments=200,
)
