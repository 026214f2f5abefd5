"""A second worker, where the model is not this machine's CPU: a forward that sleeps."""

from __future__ import annotations

import time
from typing import Final

import numpy as np

from penstock import Client
from tests.benchmarks import mlp
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.packages import write_sleeper

__all__ = ["measure"]

_FORWARD_S: Final = 0.02
_IN_FLIGHT: Final = 512
_STOP_TIMEOUT_S: Final = 30.0


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Jobs per second of two workers against one, taking turns."""
    with Harness() as harness:
        server, root = harness.redis(), harness.folder()
        write_sleeper(root, forward_s=_FORWARD_S, max_batch_size=mlp.BATCH)
        harness.worker(server, "sleeper", models_root=root)
        client = harness.producer(server)
        ratios, rates = [], []
        _rate(client, _IN_FLIGHT)
        for number in range(scale.rounds):
            one = _rate(client, scale.sleeper_jobs)
            second = harness.worker(server, "sleeper", models_root=root)
            two = _rate(client, scale.sleeper_jobs)
            second.terminate()
            second.wait(_STOP_TIMEOUT_S)
            ratios.append(two / one)
            rates.append((one, two))
            say(f"workers {number + 1}/{scale.rounds}: one {one:,.0f}/s, two {two:,.0f}/s")
    ratio = median(ratios)
    one, two = (median(column) for column in zip(*rates, strict=True))
    return [
        Row(
            f"sleep-bound model ({_FORWARD_S * 1000:.0f} ms a batch), 2 workers against 1, {_IN_FLIGHT} in flight",
            f"{two:,.0f} against {one:,.0f} jobs/s: {ratio:.2f}x",
            ">= 1.9x",
            "",
            verdict(required=ratio >= 1.9),
            {"jobs_per_s": two, "one_worker_jobs_per_s": one, "ratio": ratio},
        ),
        Row("bound: one worker on that model, full batches without a pause", f"{mlp.BATCH / _FORWARD_S:,.0f} jobs/s"),
    ]


def _rate(client: Client, jobs: int) -> float:
    rows = np.random.default_rng(jobs).standard_normal((jobs, 4), dtype=np.float32)
    begun = time.perf_counter()
    answers = client.map("sleeper", rows, window=_IN_FLIGHT)
    seconds = time.perf_counter() - begun
    if not np.array_equal(np.stack(answers), rows * 2):
        raise ValueError("Wrong answers: not twice the inputs")
    return jobs / seconds
