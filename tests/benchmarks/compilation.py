"""Compiled models: a start with a warm cache against a cold one, and a compiled forward against an eager one.

A start is a fresh process that loads the model and asks for its compiled form, from its first instruction until the
form has answered as the model does. Run as a program, this module is such a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from penstock.compose import docstrings
from penstock.registry.package import find, load_package
from penstock.registry.settings_sections import CompilationConfig
from penstock.registry.tensors import STRING, Array
from penstock.workers.compilation import TorchCompiler
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.forms import Tunable
from penstock.workers.runtime.open import open_runtime
from tests.benchmarks import mlp
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import ROOT

__all__ = ["Speed", "Start", "measure", "measure_speed", "measure_starts"]

_FORM: Final = "compiled"
_ROWS: Final = 8
_TOLERANCE: Final = 1e-5
_LEAST_ENCODER_S: Final = 1.0
"""A scale that gives the encoder less is too small to compile it: the small model stands for it."""


class Start(NamedTuple):
    """Seconds of one start: until the form was ready, and of them those that the compiler took."""

    start_s: float
    compile_s: float
    was_warm: bool


class Speed(NamedTuple):
    """Median seconds of one forward."""

    eager_s: float
    compiled_s: float


def measure(scale: Scale, say: Progress) -> list[Row]:
    """Both comparisons, for MiniLM in fp32 on one CPU thread."""
    model = "minilm" if scale.encoder_s >= _LEAST_ENCODER_S else "mlp"
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = measure_starts(model, Path(folder), say)
        speed = measure_speed(model, Path(folder), scale.rounds, say)
    ratio, gain = warm.start_s / cold.start_s, speed.eager_s / speed.compiled_s
    return [
        Row(
            f"{model}: second start with a warm compile cache against a cold one",
            f"{warm.start_s:.1f} s against {cold.start_s:.1f} s: {ratio:.2f}x "
            f"(the compiler's part {warm.compile_s:.2f} s against {cold.compile_s:.1f} s)",
            "<= 0.3x",
            "",
            verdict(required=ratio <= 0.3),
            {
                "cold_start_s": cold.start_s,
                "warm_start_s": warm.start_s,
                "cold_compile_s": cold.compile_s,
                "warm_compile_s": warm.compile_s,
                "ratio": ratio,
            },
        ),
        Row(
            f"{model}: compiled forward against eager, batch {_ROWS}, one thread",
            f"{speed.compiled_s * 1e3:.2f} ms against {speed.eager_s * 1e3:.2f} ms: {gain:.2f}x",
            figures={"compiled_s": speed.compiled_s, "eager_s": speed.eager_s, "gain": gain},
        ),
    ]


def measure_starts(model: str, home: Path, say: Progress) -> tuple[Start, Start]:
    """(cold, warm), in two processes that share `home` and nothing else. Raises ValueError if they did not."""
    starts = []
    for kind in ("cold", "warm"):
        begun = time.perf_counter()
        answer = subprocess.run(
            [sys.executable, "-m", "tests.benchmarks.compilation", model, home],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        if answer.returncode != 0:
            raise RuntimeError(f"A {kind} start of {model} failed: {answer.stderr[-300:]}")
        start = Start(time.perf_counter() - begun, **json.loads(answer.stdout.splitlines()[-1]))
        say(f"{kind} start of {model}: {start.start_s:.1f} s, of them {start.compile_s:.2f} s compiling")
        starts.append(start)
    cold, warm = starts
    if cold.was_warm or not warm.was_warm:
        raise ValueError("The first start found an artefact, or the second found none")
    return cold, warm


def measure_speed(model: str, home: Path, rounds: int, say: Progress) -> Speed:
    """Both forms through the runtime's own seam, taking turns. Raises ValueError if they answer otherwise."""
    runtime = _loaded(model)
    if not isinstance(runtime, Tunable):
        raise ValueError(f"{model} has no other forms")
    compiled = runtime.candidates(_compiler(home))[_FORM]()
    prepared = runtime.prepare([_job(runtime)])
    wanted, found = runtime.run(prepared), compiled(prepared)
    if not all(np.allclose(found[name], values, atol=_TOLERANCE) for name, values in wanted.items()):
        raise ValueError("Wrong answers: the compiled form differs from the eager one")
    taken: list[tuple[float, float]] = []
    for number in range(rounds * 10):
        taken.append((_seconds(lambda: runtime.run(prepared)), _seconds(lambda: compiled(prepared))))
        if number % 10 == 0:
            say(
                "{} {}/{}: eager {:.2f} ms, compiled {:.2f} ms".format(
                    model, number + 1, rounds * 10, *(seconds * 1e3 for seconds in taken[-1])
                )
            )
    runtime.close()
    return Speed(median(eager for eager, _ in taken), median(compiled for _, compiled in taken))


def _seconds(forward: Callable[[], object]) -> float:
    begun = time.perf_counter()
    forward()
    return time.perf_counter() - begun


def _loaded(model: str) -> Runtime:
    runtime = open_runtime(load_package(find(mlp.MODELS, model).path, (mlp.MODELS,)))
    runtime.load("cpu", 1)
    return runtime


def _job(runtime: Runtime) -> dict[str, Array]:
    """Real text for a model that reads text, whatever is valid for others."""
    first = runtime.spec.inputs[0]
    if first.dtype != STRING:
        return runtime.spec.signature.example(_ROWS)
    return {first.name: np.array([str(passage) for passage in docstrings.collect(_ROWS)], object)}


def _compiler(home: Path) -> TorchCompiler:
    return TorchCompiler(CompilationConfig(cache_dir=home / "cache"), home / "compilation.key")


def _start(model: str, home: Path) -> None:
    """One start, told in a line of JSON."""
    report = _compiler(home).compile(_loaded(model), _FORM).report  # type: ignore[arg-type]
    print(json.dumps({"compile_s": report.compile_s, "was_warm": report.was_warm}))


if __name__ == "__main__":
    _start(sys.argv[1], Path(sys.argv[2]))
