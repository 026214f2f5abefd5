"""MiniLM: texts through the queue against the same runtime called in process, one thread each, taking turns."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import numpy as np

from compose import docstrings
from registry.package import find, load_package
from tests.benchmarks import mlp
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.benchmarks.stand import Stand
from workers.runtime.base import Runtime
from workers.runtime.open import open_runtime

__all__ = ["measure"]

_MOST_TEXTS: Final = 4_096
_TOLERANCE: Final = 1e-5


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Texts per second, tokenising included, same texts in the same order."""
    runtime = open_runtime(load_package(find(mlp.MODELS, "minilm").path, (mlp.MODELS,)))
    runtime.load("cpu", 1)
    texts = _texts(runtime, scale.encoder_s)
    rates: dict[str, list[float]] = {"queue": [], "in process": []}
    with Stand() as stand:
        server = stand.redis()
        stand.worker(server, "minilm")
        client = stand.producer(server)
        client.map("minilm", texts[: mlp.BATCH])
        for number in range(scale.rounds):
            begun = time.perf_counter()
            expected = _in_process(runtime, texts)
            between = time.perf_counter()
            vectors = np.stack(client.map("minilm", texts))
            ended = time.perf_counter()
            if not np.allclose(vectors, expected, atol=_TOLERANCE):
                raise ValueError("Wrong answers: embeddings through the queue differ from those in process")
            rates["in process"].append(len(texts) / (between - begun))
            rates["queue"].append(len(texts) / (ended - between))
            say(f"minilm {number + 1}/{scale.rounds}: " + ", ".join(f"{k} {v[-1]:,.0f}/s" for k, v in rates.items()))
    runtime.close()
    ratio = median(queue / alone for queue, alone in zip(rates["queue"], rates["in process"], strict=True))
    queue, alone = median(rates["queue"]), median(rates["in process"])
    return [
        Row(
            f"MiniLM through the queue against the same runtime in process, {len(texts):,} texts in arrival order",
            f"{queue:,.0f} against {alone:,.0f} texts/s: {ratio:.2f}x",
            ">= 0.97x",
            ">= 1.0x",
            verdict(required=ratio >= 0.97, aim=ratio >= 1),
            {"texts_per_s": queue, "in_process_texts_per_s": alone, "ratio": ratio},
        )
    ]


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
