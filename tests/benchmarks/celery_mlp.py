"""The common peer: a plain Celery task per job, with lists in and out, written as users of Celery write it.

Run as `celery -A tests.benchmarks.celery_mlp worker -P prefork -c 1` with the broker in BENCH_CELERY_URL.
"""

from __future__ import annotations

import os
from functools import cache
from typing import TYPE_CHECKING, Final

from celery import Celery

from tests.benchmarks import mlp

if TYPE_CHECKING:
    import torch

__all__ = ["CLASSIFY", "app"]

CLASSIFY: Final = "bench.classify"
"""The task's name."""
_URL: Final = os.environ.get("BENCH_CELERY_URL", "memory://")

app = Celery("bench", broker=_URL, backend=None if _URL == "memory://" else _URL)


@cache
def _model() -> torch.nn.Module:
    return mlp.module()


@app.task(name=CLASSIFY)  # type: ignore[untyped-decorator]  # Celery is untyped
def classify(x: list[float]) -> list[float]:
    """384 numbers -> 10 logits."""
    import torch

    with torch.inference_mode():
        logits: list[float] = _model()(torch.tensor([x]))[0].tolist()
    return logits
