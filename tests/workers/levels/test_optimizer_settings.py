"""Settings and levels in the optimizer: which forms may be compiled, by which tolerance, and with which records."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array
from penstock.workers.compilation import TorchCompiler
from penstock.workers.compilation.build_process import BuildProcess
from penstock.workers.levels.optimizer import InferenceOptimizer
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime import prepacked, pytorch
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.compilable import CompilationRefused
from tests.workers.levels.fake_model import Form, served
from tests.workers.levels.test_optimizer import MakeHarness, make_harness, off_by
from tests.workers.levels.test_optimizer_models import hurried, settle
from tests.workers.runtime import formats

__all__ = ["make_harness"]

BATCH = 16


class Tuned:
    """A real model with an optimizer, and the results of its traffic."""

    def __init__(self, home: Path, package: Path, *, threads: int = 1, **config: Any) -> None:
        settings = InferenceConfig.model_validate(config)
        self.compiler = TorchCompiler(settings.compilation, home / "compilation.key")
        self.audited: list[Mapping[str, object]] = []
        self.optimizer = InferenceOptimizer(
            settings,
            home=home,
            device="cpu",
            audit=self.audited.append,
            metrics=InferenceMetrics((1.0,)),
            compiler=self.compiler,
        )
        self.runtime: Runtime = formats.opened(package, threads=threads)
        self.model = self.runtime.spec.name
        self._profiler = self.optimizer.attach(self.model, self.runtime, self.runtime.content_hash, BATCH)

    def serve(self, jobs: Sequence[Mapping[str, Array]]) -> None:
        """Serves traffic long enough for every criterion, and lets the optimizer finish."""
        for first in range(0, len(jobs), BATCH):
            served(self.runtime, hurried, jobs[first : first + BATCH], self._profiler.observe, first)
        settle(self.optimizer)

    def steps(self) -> list[dict[str, Any]]:
        """The steps of the report."""
        (entry,) = self.optimizer.report()[self.model]
        steps = entry["steps"]
        assert isinstance(steps, list)
        return steps

    def close(self) -> None:
        self.compiler.stop()
        self.runtime.close()


@pytest.fixture
def tuned(tmp_path: Path) -> Iterator[Any]:
    made: list[Tuned] = []

    def make(package: Path, **config: Any) -> Tuned:
        made.append(Tuned(tmp_path / "home", package, **config))
        return made[-1]

    (tmp_path / "home").mkdir()
    threads = torch.get_num_threads()
    yield make
    torch.set_num_threads(threads)
    for each in made:
        each.close()


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_compiled_where_that_is_off(
    tuned: Any, tmp_path: Path, models_root: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
):
    """With `compilation.enabled` the traffic of a torch model starts a process that compiles. Without it there is no
    such process, no such step and no cache, and the other levels work (CF-012)."""
    begun: list[object] = []

    def refuse(_: BuildProcess, request: object, *, threads: int) -> dict[str, bytes]:
        begun.append(request)
        raise CompilationRefused("not in this test")

    monkeypatch.setattr(BuildProcess, "run", refuse)
    # The other forms of level 2 need no compiler: how fast they are here is not the question.
    monkeypatch.setattr(pytorch, "can_export", lambda: False)
    monkeypatch.setattr(prepacked, "can_prepack", lambda _: False)
    cache = tmp_path / "cache"
    compilation = {"enabled": enabled, "cache_dir": str(cache)}
    model = tuned(formats.write_pytorch(models_root), max_level=2, compilation=compilation)
    numbers = np.random.default_rng(7).standard_normal((20 * BATCH, 1, 4)).astype(np.float32)
    model.serve([{"x": rows} for rows in numbers])
    steps = [line["step"] for line in model.steps()]
    assert (len(begun) > 0, "compiled" in steps, cache.exists()) == (enabled,) * 3
    assert [record["step"] for record in model.audited if record["action"] == "enabled"] == ["batching"]


@pytest.mark.parametrize(("tolerance", "form"), [(1e-3, "compiled"), (1e-5, "eager"), (1e-6, "eager")])
def test_the_tolerance_is_the_one_that_is_set(make_harness: MakeHarness, tolerance: float, form: str):
    """A form that is off by half of 1e-3 serves where `compilation.tolerance` is 1e-3, and not where it is lower. The
    record has the error ratio (CF-016)."""
    harness = make_harness({"compiled": Form(off_by(0.5e-3))}, config={"compilation": {"tolerance": tolerance}})
    harness.serve(61)
    harness.settle()
    assert harness.runtime.forms.name == form
    assert harness.step("compiled")["evidence"]["y.max_error_ratio"] == pytest.approx(0.5e-3 / tolerance, rel=1e-2)


def test_levels_1_and_2_are_on_record(tuned: Any, models_root: Path, tmp_path: Path):
    """An encoder's first two levels are a decision each, with level, criterion and evidence, in the log that a restart
    reads and in the audit; level 0 decides nothing (AR-012)."""
    package = formats.write_encoder(models_root)
    texts = [f"text {number}" for number in range(3 * BATCH)]
    jobs = [{"text": np.array([text], object)} for text in texts]
    tuned(package, max_level=0).serve(jobs)
    assert not (tmp_path / "home" / "decisions").exists()
    model = tuned(package, max_level=2, compilation={"enabled": False})
    model.serve(jobs)
    lines = (tmp_path / "home" / "decisions" / "encoder.jsonl").read_text().splitlines()
    decided = [(record["level"], record["step"], record["action"]) for record in map(json.loads, lines)]
    assert decided == [(1, "tokenizer-cache", "enabled"), (2, "batching", "enabled")]
    cache, batching = model.audited
    assert cache["criterion"] == "texts 48 >= 32"
    assert cache["evidence"] == {"id_agreement": 1.0, "texts": 48.0}
    assert batching["criterion"] == "golden_rows 48 >= 16"
    assert batching["evidence"]["jobs_alone"] == 32
    assert [record["content_hash"] for record in model.audited] == [model.runtime.content_hash] * 2


@pytest.mark.parametrize(("gain", "state"), [(1.19, "refused"), (1.2, "on")])
def test_the_pool_is_used_where_it_was_measured_to_win(tuned: Any, models_root: Path, gain: float, state: str):
    """With two threads granted a pool is measured on golden texts; the gain decides and is on record, and only a pool
    that won has threads (AR-053). Why it can win is in test_tokeniser.py."""
    model = tuned(formats.write_encoder(models_root), threads=2, max_level=1, compilation={"enabled": False})
    tokeniser = model.runtime.tokeniser
    tokeniser.pool_gain = lambda texts, rounds, clock: gain
    model.serve([{"text": np.array([f"pump {number}"], object)} for number in range(256)])
    (line,) = [line for line in model.steps() if line["step"] == "tokenizer-pool"]
    assert (line["state"], line["gain"], line["evidence"]) == (state, gain, {"threads": 2.0})
    tokeniser.cache = None
    tokeniser.encode([f"valve {number}" for number in range(128)])
    pool = [thread for thread in threading.enumerate() if thread.name.startswith("tokenise")]
    assert bool(pool) is (state == "on")
