"""MiniLM at max_level 2 and 3 against eager fp32: the same sentences, taking turns, forms chosen by the optimizer.

Three runtimes of one package in one process. Two of them stand under an optimizer that sees their traffic and is then
told to try what its level allows; the form that passed its gate is measured. A run on the smallest scale builds
nothing that takes a compiler, so that level 2 is eager there.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from penstock.compose import docstrings
from penstock.registry.package import find, load_package
from penstock.registry.settings import InferenceConfig
from penstock.registry.tensors import Array
from penstock.workers.compilation import TorchCompiler
from penstock.workers.levels.optimizer import Optimizer
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.cpu import has_fast_bf16
from penstock.workers.runtime.open import open_runtime
from penstock.workers.runtime.tokeniser import TokenCache, Tokeniser
from penstock.workers.runtime.transformers import EncoderRuntime
from tests.benchmarks import mlp
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.workers.levels.fake_model import served

__all__ = ["measure"]

_LEVELS: Final = (0, 2, 3)
_BATCH: Final = 32
_TOKENS: Final = range(31, 34)
"""Lengths of the sentences: about 32, as of one line of text."""
_PASSAGES: Final = 1_024
_TEXTS: Final = 256
"""Passages that are tokenised at once: four batches of a worker."""
_TRAFFIC: Final = 24
"""Batches that an optimizer sees before it is asked."""
_TRAFFIC_ROWS: Final = 8
_HASTE: Final = 10.0
"""How much faster than ours the clock of that traffic runs: it stands for so much more of it."""
_ROUNDS_PER_ROUND: Final = 9
"""Other users of the machine disturb short turns less often, so there are more of them."""
_MIN_COSINE: Final = 0.999
_REQUIRED_WITH_BF16: Final = 3.0
_REQUIRED_WITHOUT: Final = 1.6


class _Contender(NamedTuple):
    """A runtime at its level, with the batch that it prepared itself."""

    runtime: EncoderRuntime
    batch: Prepared
    seconds: list[float]


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Sentences per second of forwards, tokenising apart, as it runs beside them in a worker."""
    builds = scale.rounds > 1
    runtimes = [_loaded() for _ in _LEVELS]
    jobs = _jobs(runtimes[0])
    with tempfile.TemporaryDirectory(prefix="penstock-levels-") as folder:
        for level, runtime in zip(_LEVELS, runtimes, strict=True):
            if level == 3 or (level and builds):
                told = _optimised(runtime, jobs, level, Path(folder), builds)
                say(f"levels: max_level {level}: {told}")
    contenders = [_Contender(runtime, runtime.prepare(jobs[:_BATCH]), []) for runtime in runtimes]
    rounds = scale.rounds * _ROUNDS_PER_ROUND if builds else 1
    for number in range(rounds):
        for contender in contenders:
            contender.seconds.append(_seconds(contender))
        say(f"levels {number + 1}/{rounds}: " + ", ".join(f"{_rate(one, -1):,.0f}/s" for one in contenders))
    eager, *others = contenders
    rows = [_row(level, eager, one, is_required=level == 3) for level, one in zip(_LEVELS[1:], others, strict=True)]
    for contender in contenders:
        contender.runtime.close()
    return [*rows, *_tokeniser_rows()]


def _tokeniser_rows() -> list[Row]:
    """Level 1: a batch of texts by two threads against one, and known against unknown."""
    runtime = _loaded(threads=2)
    tokeniser = runtime.tokeniser
    if tokeniser is None:
        raise ValueError("minilm has no tokenizer")
    texts = list(dict.fromkeys(str(passage) for passage in docstrings.collect(_PASSAGES)))[:_TEXTS]
    pool_gain = tokeniser.pool_gain(texts, _ROUNDS_PER_ROUND, time.perf_counter)
    unknown_s = min(_tokenising_s(tokeniser, texts) for _ in range(_ROUNDS_PER_ROUND))
    tokeniser.cache = TokenCache(2 * _TEXTS, 32 << 20)
    tokeniser.encode(texts)
    known_s = min(_tokenising_s(tokeniser, texts) for _ in range(_ROUNDS_PER_ROUND))
    runtime.close()
    figures = {"pool_gain": pool_gain, "cache_gain": unknown_s / known_s}
    return [
        Row(
            f"tokenising {len(texts)} passages: two threads against one / cached texts against new ones",
            f"{pool_gain:.2f}x / {unknown_s / known_s:.0f}x",
            figures=figures,
        )
    ]


def _tokenising_s(tokeniser: Tokeniser, texts: Sequence[str]) -> float:
    begun = time.perf_counter()
    tokeniser.encode(texts)
    return time.perf_counter() - begun


def _loaded(threads: int = 0) -> EncoderRuntime:
    """threads: 0: as many as the run was given."""
    runtime = open_runtime(load_package(find(mlp.MODELS, "minilm").path, (mlp.MODELS,)))
    if not isinstance(runtime, EncoderRuntime):
        raise ValueError("minilm is no encoder")
    runtime.load("cpu", threads or int(os.environ["OMP_NUM_THREADS"]))
    return runtime


def _optimised(
    runtime: EncoderRuntime, jobs: Sequence[dict[str, Array]], level: int, folder: Path, builds: bool
) -> str:
    """Brings a runtime to its level; returns what came of each form."""
    config = InferenceConfig(max_level=level)
    compilation = config.compilation.model_copy(update={"cache_dir": folder / "cache"})
    compiler = TorchCompiler(compilation, folder / "compilation.key") if builds else None
    home = folder / f"level-{level}"
    optimizer = Optimizer(
        config, home=home, device="cpu", audit=_unheard, metrics=InferenceMetrics((1.0,)), compiler=compiler
    )
    profiler = optimizer.attach(level, runtime, runtime.content_hash, _BATCH)
    rows = _TRAFFIC_ROWS if builds else 1
    for start in range(0, _TRAFFIC * rows, rows):
        part = jobs[start : start + rows]
        served(runtime, lambda: time.monotonic() * _HASTE, part, profiler.observe, start)
    while optimizer.tick():
        pass
    answer = optimizer.ask("minilm", "optimise" if builds else "compile")
    while optimizer.tick():
        pass
    optimizer.stop()
    return f"{runtime.forms.name} ({'; '.join(answer.result(0).splitlines())})"


def _jobs(runtime: EncoderRuntime) -> list[dict[str, Array]]:
    """One job a sentence; real text, of about 32 tokens each."""
    tokeniser = runtime.tokeniser
    if tokeniser is None:
        raise ValueError("minilm has no tokenizer")
    sentences = [str(passage)[:160] for passage in docstrings.collect(_PASSAGES)]
    ids = tokeniser.encode(sentences)
    alike = [text for text, each in zip(sentences, ids, strict=True) if len(each) in _TOKENS]
    if not alike:
        raise ValueError("no sentence of the wanted length was found")
    return [{"text": np.array([alike[number % len(alike)]], object)} for number in range(_TRAFFIC * _TRAFFIC_ROWS)]


def _seconds(contender: _Contender) -> float:
    begun = time.perf_counter()
    contender.runtime.run(contender.batch)
    return time.perf_counter() - begun


def _rate(contender: _Contender, number: int) -> float:
    return contender.batch.rows / contender.seconds[number]


def _vectors(contender: _Contender) -> Array:
    return contender.runtime.run(contender.batch)["embedding"]


def _row(level: int, eager: _Contender, other: _Contender, *, is_required: bool) -> Row:
    cosine = float((_vectors(eager) * _vectors(other)).sum(axis=1).min())
    ratio = median(slow / fast for slow, fast in zip(eager.seconds, other.seconds, strict=True))
    ours, theirs = (one.batch.rows / median(one.seconds) for one in (other, eager))
    least = _REQUIRED_WITH_BF16 if has_fast_bf16() else _REQUIRED_WITHOUT
    return Row(
        f"MiniLM at `max_level` {level} against eager fp32, forwards of {_BATCH} sentences of about 32 tokens",
        f"{ours:,.0f} against {theirs:,.0f} sentences/s: {ratio:.2f}x as {other.runtime.forms.name}, "
        f"cosine {cosine:.4f}",
        f">= {least:g}x, cosine >= {_MIN_COSINE:g}" if is_required else "",
        "",
        verdict(required=ratio >= least and cosine >= _MIN_COSINE) if is_required else None,
        {"sentences_per_s": ours, "eager_sentences_per_s": theirs, "ratio": ratio, "min_cosine": cosine},
    )


def _unheard(_: object) -> None:
    """A benchmark keeps no audit."""
