"""MiniLM at max_level 2 and 3 against eager fp32: the same texts, taking turns, forms chosen by the optimizer.

Three runtimes of one package in one process. Two of them stand under an optimizer that sees their traffic and is then
told to try what its level allows; the form that passed its gate is measured. The forms that take no compiler are
measured as well, whether or not a gate let them serve. Times are CPU times of the process, so that other users of the
machine disturb them little.
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
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array
from penstock.workers.compilation import TorchCompiler
from penstock.workers.levels.optimizer import InferenceOptimizer
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.forms import Forward
from penstock.workers.runtime.open import open_runtime
from penstock.workers.runtime.tokeniser import TokenCache, Tokeniser
from penstock.workers.runtime.transformers import EncoderRuntime
from tests.benchmarks import mlp
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.workers.levels.fake_model import served

__all__ = ["measure"]

_LEVELS: Final = (0, 2, 3)
_SHAPES: Final = ((8, 32), (32, 32), (64, 32), (32, 128))
"""Texts of a batch, and about how many tokens each has."""
_BATCH: Final = 64
_TOKENS: Final = 32
"""Tokens of the texts that the optimizers see: as of one line of text."""
_QUICK_FORMS: Final = ("prepacked", "bf16")
_CHARACTERS_PER_TOKEN: Final = (3.0, 3.5, 4.0, 4.5, 5.0)
"""Texts are cut at so many: prose has more of them in a token than code. A form is judged on at least 16 texts."""
_PASSAGES: Final = 1_024
_TEXTS: Final = 256
"""Passages that are tokenised at once: four batches of a worker."""
_TRAFFIC: Final = 24
"""Batches that an optimizer sees before it is asked."""
_TRAFFIC_ROWS: Final = 8
_HASTE: Final = 10.0
"""How much faster than ours the clock of that traffic runs: it stands for so much more of it."""
_ROUNDS_PER_ROUND: Final = 5
"""Other users of the machine disturb short turns less often, so there are more of them."""


class _Target(NamedTuple):
    """What a level owes: how many times as fast as the eager model, and how far its vectors may be from that one's."""

    required: float
    aim: float
    max_difference: float
    min_cosine: float


_TARGETS: Final = {2: _Target(1.2, 1.5, 1e-5, 0.999), 3: _Target(2.4, 3.5, 2.0, 0.999)}


class _Contender(NamedTuple):
    """A forward with the runtime that prepares its batches. seconds: CPU time of each turn, by shape."""

    name: str
    runtime: EncoderRuntime
    forward: Forward
    seconds: dict[tuple[int, int], list[float]]


class _Found(NamedTuple):
    """How a contender did on one shape."""

    ratio: float
    difference: float
    cosine: float


def measure(scale: Scale, say: Progress) -> list[Row]:
    """CPU time of forwards, tokenising apart, as it runs beside them in a worker."""
    builds = scale.rounds > 1
    runtimes = [_loaded() for _ in _LEVELS]
    traffic = _jobs(runtimes[0], _TOKENS)
    with tempfile.TemporaryDirectory(prefix="penstock-levels-") as folder:
        for level, runtime in zip(_LEVELS[1:], runtimes[1:], strict=True):
            say(f"levels: max_level {level}: {_optimised(runtime, traffic, level, Path(folder), builds)}")
    eager, *others = contenders = _contenders(runtimes)
    found: dict[str, dict[tuple[int, int], _Found]] = {one.name: {} for one in others}
    for shape in _SHAPES:
        rows, tokens = shape
        jobs = (traffic if tokens == _TOKENS else _jobs(runtimes[0], tokens))[:rows]
        batches = [one.runtime.prepare(jobs) for one in contenders]
        for _ in range(scale.rounds * _ROUNDS_PER_ROUND if builds else 1):
            for contender, batch in zip(contenders, batches, strict=True):
                contender.seconds.setdefault(shape, []).append(_cpu_seconds(contender.forward, batch))
        expected = eager.forward(batches[0])["embedding"]
        for contender, batch in zip(others, batches[1:], strict=True):
            found[contender.name][shape] = _compared(eager, contender, shape, batch, expected)
        told = ", ".join(f"{name} {each[shape].ratio:.2f}x" for name, each in found.items())
        say(f"levels {rows}x{tokens}: eager {median(eager.seconds[shape]) * 1e3:.0f} ms, {told}")
    levels = {
        f"`max_level` {level}": (runtime, _TARGETS[level])
        for level, runtime in zip(_LEVELS[1:], runtimes[1:], strict=True)
    }
    table = [_row(name, each, *levels.get(name, (None, None))) for name, each in found.items()]
    for runtime in runtimes:
        runtime.close()
    return [*table, *_tokeniser_rows()]


def _contenders(runtimes: Sequence[EncoderRuntime]) -> list[_Contender]:
    """The eager model, the models at their levels, and the forms that are built quickly."""
    eager = runtimes[0]
    candidates = eager.candidates(None)
    return [
        _Contender("eager", eager, eager.forms.reference, {}),
        *(
            _Contender(f"`max_level` {level}", runtime, runtime.run, {})
            for level, runtime in zip(_LEVELS, runtimes, strict=True)
            if level
        ),
        *(_Contender(name, eager, candidates[name](), {}) for name in _QUICK_FORMS if name in candidates),
    ]


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
    optimizer = InferenceOptimizer(
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


def _jobs(runtime: EncoderRuntime, tokens: int) -> list[dict[str, Array]]:
    """One job a text; real text, of about so many tokens each."""
    tokeniser = runtime.tokeniser
    if tokeniser is None:
        raise ValueError("minilm has no tokenizer")
    passages = [str(passage) for passage in docstrings.collect(_PASSAGES)]
    joined = [" ".join(passages[start : start + 8]) for start in range(len(passages))]
    texts = list(dict.fromkeys(text[: round(each * tokens)] for each in _CHARACTERS_PER_TOKEN for text in joined))
    ids = tokeniser.encode(texts)
    alike = [text for text, each in zip(texts, ids, strict=True) if abs(len(each) - tokens) <= tokens / 32]
    if not alike:
        raise ValueError(f"no text of {tokens} tokens was found")
    return [{"text": np.array([alike[number % len(alike)]], object)} for number in range(_TRAFFIC * _TRAFFIC_ROWS)]


def _cpu_seconds(forward: Forward, batch: Prepared) -> float:
    begun = time.process_time()
    forward(batch)
    return time.process_time() - begun


def _compared(eager: _Contender, other: _Contender, shape: tuple[int, int], batch: Prepared, expected: Array) -> _Found:
    """The median of the turns' ratios, and how far the vectors are from the eager model's."""
    vectors = other.forward(batch)["embedding"]
    return _Found(
        median(slow / fast for slow, fast in zip(eager.seconds[shape], other.seconds[shape], strict=True)),
        float(np.abs(vectors - expected).max()),
        float((vectors * expected).sum(axis=1).min()),
    )


def _row(
    name: str, found: dict[tuple[int, int], _Found], runtime: EncoderRuntime | None, target: _Target | None
) -> Row:
    """target: None for a form that is measured at no level."""
    ratios = ", ".join(f"{rows}x{tokens} {one.ratio:.2f}x" for (rows, tokens), one in found.items())
    least = min(one.ratio for one in found.values())
    difference = max(one.difference for one in found.values())
    cosine = min(one.cosine for one in found.values())
    what = f"at {name}" if runtime else f"in the form {name}"
    form = f" as {runtime.forms.name}" if runtime else ""
    is_close = target is not None and difference <= target.max_difference and cosine >= target.min_cosine
    return Row(
        f"MiniLM {what} against eager fp32, one thread, by CPU time, texts x tokens",
        f"{ratios}{form}; largest difference {difference:.1e}, least cosine {cosine:.5f}",
        f">= {target.required:g}x, {_closeness(target)}" if target else "",
        f">= {target.aim:g}x" if target else "",
        verdict(required=is_close and least >= target.required, aim=least >= target.aim) if target else None,
        {
            **{f"ratio_{rows}x{tokens}": one.ratio for (rows, tokens), one in found.items()},
            "max_difference": difference,
            "min_cosine": cosine,
        },
    )


def _closeness(target: _Target) -> str:
    if target.max_difference < 1:
        return f"difference <= {target.max_difference:g}"
    return f"cosine >= {target.min_cosine:g}"


def _unheard(_: object) -> None:
    """A benchmark keeps no audit."""
