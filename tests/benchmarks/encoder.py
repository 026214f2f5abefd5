"""MiniLM: texts through the queue against the same runtime called in process, one thread each, taking turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np

from penstock.compose import docstrings
from penstock.registry.package import find, load_package
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.open import open_runtime
from tests.benchmarks import meter, mlp
from tests.benchmarks.harness import Harness
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["measure"]

_MOST_TEXTS: Final = 4_096
_TOLERANCE: Final = 1e-5
_ROUNDS_PER_ROUND: Final = 2
"""Other users of the machine disturb short turns less often, so there are more of them."""


class Run(NamedTuple):
    """Vectors (texts, 384) and what they cost; the CPU is that of the process with the model."""

    vectors: np.ndarray
    seconds: float
    cpu_s: float


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Texts per second, tokenising included, same texts in the same order."""
    runtime = open_runtime(load_package(find(mlp.MODELS, "minilm").path, (mlp.MODELS,)))
    runtime.load("cpu", 1)
    texts = _texts(runtime, scale.encoder_s)
    taken: list[tuple[Run, Run]] = []
    with Harness() as harness:
        server = harness.redis()
        worker = harness.worker(server, "minilm")
        client = harness.producer(server)
        client.map("minilm", texts[: mlp.BATCH])
        rounds = scale.rounds * _ROUNDS_PER_ROUND
        for number in range(rounds):
            alone = _timed(lambda: _in_process(runtime, texts), os.getpid())
            queue = _timed(lambda: np.stack(client.map("minilm", texts)), worker.pid)
            if not np.allclose(queue.vectors, alone.vectors, atol=_TOLERANCE):
                raise ValueError("Wrong answers: embeddings through the queue differ from those in process")
            taken.append((queue, alone))
            rates = (len(texts) / run.seconds for run in (queue, alone))
            say("minilm {}/{}: queue {:,.0f}/s, in process {:,.0f}/s".format(number + 1, rounds, *rates))
    runtime.close()
    ratio = median(alone.seconds / queue.seconds for queue, alone in taken)
    cpu_ratio = median(alone.cpu_s / queue.cpu_s for queue, alone in taken)
    queue_rate, alone_rate = (len(texts) / median(run.seconds for run in runs) for runs in zip(*taken, strict=True))
    return [
        Row(
            f"MiniLM through the queue against the same runtime in process, {len(texts):,} texts in arrival order",
            f"{cpu_ratio:.2f}x by CPU; {queue_rate:,.0f} against {alone_rate:,.0f} texts/s: {ratio:.2f}x",
            ">= 0.98x by CPU",
            ">= 1.0x",
            verdict(required=cpu_ratio >= 0.98, aim=cpu_ratio >= 1),
            {"texts_per_s": queue_rate, "in_process_texts_per_s": alone_rate, "ratio": ratio, "cpu_ratio": cpu_ratio},
        )
    ]


def _timed(embed: Callable[[], np.ndarray], pid: int) -> Run:
    cpu_s, begun = meter.cpu_seconds([pid]), time.perf_counter()
    vectors = embed()
    return Run(vectors, time.perf_counter() - begun, meter.cpu_seconds([pid]) - cpu_s)


def _texts(runtime: Runtime, seconds: float) -> list[str]:
    """Real text, as much as takes about `seconds` in process, in full batches."""
    texts = [str(passage) for passage in docstrings.collect(_MOST_TEXTS)]
    begun = time.perf_counter()
    _in_process(runtime, texts[: 2 * mlp.BATCH])
    rate = 2 * mlp.BATCH / (time.perf_counter() - begun)
    return texts[: max(1, round(rate * seconds / mlp.BATCH)) * mlp.BATCH]


def _in_process(runtime: Runtime, texts: Sequence[str]) -> np.ndarray:
    batches = [texts[start : start + mlp.BATCH] for start in range(0, len(texts), mlp.BATCH)]
    jobs = [[{"text": np.array([text], object)} for text in batch] for batch in batches]
    return np.concatenate([runtime.run(runtime.prepare(batch))["embedding"] for batch in jobs])
