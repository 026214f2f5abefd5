"""MiniLM at max_level 2 and 3 against eager fp32: the same sentences, taking turns, forms chosen by the optimizer.

Three runtimes of one package in one process. Two of them stand under an optimizer that sees their traffic and is then
told to try what its level allows; whatever passed its gate is what is measured. A run on the smallest scale builds
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

from compose import docstrings
from registry.package import find, load_package
from registry.settings import InferenceConfig
from registry.tensors import Array
from tests.benchmarks import mlp
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.workers.leveled import served
from workers.compilation import TorchCompiler
from workers.observe.metrics import InferenceMetrics
from workers.optimizer import Optimizer
from workers.runtime.base import Prepared
from workers.runtime.cpu import has_fast_bf16
from workers.runtime.open import open_runtime
from workers.runtime.transformers import EncoderRuntime

__all__ = ["measure"]

_BATCH: Final = 32
_TOKENS: Final = range(30, 35)
"""Lengths of the sentences: about 32, as of one line of text."""
_PASSAGES: Final = 4_096
_TRAFFIC: Final = 24
"""Batches that an optimizer sees before it is asked."""
_TRAFFIC_ROWS: Final = 8
_HASTE: Final = 10.0
"""How much faster than ours the clock of that traffic runs: it stands for so much more of it."""
_ROUNDS_PER_ROUND: Final = 3
"""Other users of the machine disturb short turns less often, so there are more of them."""
_MIN_COSINE: Final = 0.999
_REQUIRED_WITH_BF16: Final = 3.0
_REQUIRED_WITHOUT: Final = 1.6


class _Contender(NamedTuple):
    """A runtime at its level, with the batches that it prepared itself."""

    runtime: EncoderRuntime
    batches: list[Prepared]
    seconds: list[float]


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Sentences per second of forwards, tokenising apart, as it runs beside them in a worker."""
    builds = scale.rounds > 1
    with tempfile.TemporaryDirectory(prefix="penstock-levels-") as folder:
        contenders = [_at_level(level, Path(folder), builds, say) for level in (0, 2, 3)]
    rounds = scale.rounds * _ROUNDS_PER_ROUND
    for number in range(rounds):
        for contender in contenders:
            contender.seconds.append(_seconds(contender))
        say(f"levels {number + 1}/{rounds}: " + ", ".join(f"{_rate(one, -1):,.0f}/s" for one in contenders))
    eager, *others = contenders
    rows = [_row(level, eager, one, is_required=level == 3) for level, one in zip((2, 3), others, strict=True)]
    for contender in contenders:
        contender.runtime.close()
    return rows


def _at_level(level: int, folder: Path, builds: bool, say: Progress) -> _Contender:
    runtime = open_runtime(load_package(find(mlp.MODELS, "minilm").path, (mlp.MODELS,)))
    if not isinstance(runtime, EncoderRuntime):
        raise ValueError("minilm is no encoder")
    runtime.load("cpu", int(os.environ["OMP_NUM_THREADS"]))
    jobs = _jobs(runtime)
    if level:
        say(f"levels: max_level {level}: {_optimised(runtime, jobs, level, folder, builds)}")
    batches = [runtime.prepare(jobs[start : start + _BATCH]) for start in range(0, 4 * _BATCH, _BATCH)]
    return _Contender(runtime, batches, [])


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
    for start in range(0, _TRAFFIC * _TRAFFIC_ROWS, _TRAFFIC_ROWS):
        part = jobs[start : start + _TRAFFIC_ROWS]
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
    for batch in contender.batches:
        contender.runtime.run(batch)
    return time.perf_counter() - begun


def _rate(contender: _Contender, number: int) -> float:
    return sum(batch.rows for batch in contender.batches) / contender.seconds[number]


def _vectors(contender: _Contender) -> Array:
    return np.concatenate([contender.runtime.run(batch)["embedding"] for batch in contender.batches])


def _row(level: int, eager: _Contender, other: _Contender, *, is_required: bool) -> Row:
    cosine = float((_vectors(eager) * _vectors(other)).sum(axis=1).min())
    ratio = median(slow / fast for slow, fast in zip(eager.seconds, other.seconds, strict=True))
    ours, theirs = (sum(batch.rows for batch in one.batches) / median(one.seconds) for one in (other, eager))
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
