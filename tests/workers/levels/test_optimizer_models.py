"""The levels on real models: the tokenizer's cache, prepacked, bf16, int8 and compiled forms, each through the gate.

Whether a form is faster is not measured here: each model's clock counts its calls, at a price for each form.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.registry.package import load_package
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array
from penstock.workers.compilation import TorchCompiler
from penstock.workers.levels.optimizer import InferenceOptimizer
from penstock.workers.levels.profiler import Profiler
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime import open_runtime, prepacked
from penstock.workers.runtime.base import Prepared
from penstock.workers.runtime.cpu import has_fast_bf16
from penstock.workers.runtime.forms import Forward, WithProvenance
from penstock.workers.runtime.pytorch import PyTorchRuntime
from penstock.workers.runtime.transformers import EncoderRuntime
from tests.servers import ROOT, require_module
from tests.workers.levels.fake_model import served

BATCH = 4
JOBS = 20 * BATCH
"""Twenty batches: enough of each for every criterion."""
HASTE = 1e6
"""How much faster the clock runs that times the forwards: a millisecond counts as a quarter of an hour."""


def hurried() -> float:
    """Seconds of a fast clock, by which every model soon has run long enough."""
    return time.monotonic() * HASTE


@pytest.fixture
def minilm() -> Iterator[EncoderRuntime]:
    runtime = open_runtime(load_package(ROOT / "models" / "minilm" / "1"))
    assert isinstance(runtime, EncoderRuntime)
    runtime.load("cpu", 1)
    yield runtime
    runtime.close()


@pytest.fixture
def mlp() -> Iterator[PyTorchRuntime]:
    runtime = open_runtime(load_package(ROOT / "models" / "mlp" / "1"))
    assert isinstance(runtime, PyTorchRuntime)
    runtime.load("cpu", 1)
    yield runtime
    runtime.close()


def optimizer_of(
    home: Path,
    max_level: int | None = None,
    compiler: TorchCompiler | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> InferenceOptimizer:
    """max_level: None: the default of the settings."""
    return InferenceOptimizer(
        InferenceConfig() if max_level is None else InferenceConfig(max_level=max_level),
        home=home,
        device="cpu",
        audit=lambda _: None,
        metrics=InferenceMetrics((1.0,)),
        compiler=compiler,
        clock=clock,
    )


class CallClock:
    """Seconds that pass by the calls of a model: one for each call of the eager model, `cost_s` for one of a form."""

    def __init__(self, runtime: EncoderRuntime | PyTorchRuntime, cost_s: float) -> None:
        self._runtime = runtime
        self._cost_s = cost_s
        self._spent_s = 0.0

    def __call__(self) -> float:
        return self._runtime.call_count + self._spent_s

    def only(self, name: str) -> Callable[[TorchCompiler | None], dict[str, Callable[[], Forward]]]:
        """Only this one of the runtime's candidates, at its price."""
        builder = self._runtime.candidates(None)[name]

        def build() -> Forward:
            built = builder()

            def forward(prepared: Prepared) -> dict[str, Array]:
                # An encoder calls its model for each slice of a batch.
                calls = len(prepared.payload) if isinstance(self._runtime, EncoderRuntime) else 1
                self._spent_s += self._cost_s * calls
                return built(prepared)

            return WithProvenance(forward, built.made, dict) if isinstance(built, WithProvenance) else forward

        return lambda _: {name: build}


def texts(count: int) -> list[str]:
    """Different sentences of some fifteen tokens."""
    makers = ["A pump lifts", "The turbine takes", "A valve holds back", "One reservoir keeps"]
    places = ["the river in spring", "the village below", "a dry winter", "a ship without a harbour"]
    return [f"{makers[number % 4]} {number} tons of water for {places[number // 4 % 4]}" for number in range(count)]


def embed(runtime: EncoderRuntime, sentences: Sequence[str]) -> Array:
    return runtime.run(runtime.prepare([{"text": np.array(sentences, object)}]))["embedding"]


def serve(runtime: EncoderRuntime | PyTorchRuntime, profiler: Profiler, jobs: Sequence[Mapping[str, Array]]) -> None:
    for first in range(0, len(jobs), BATCH):
        served(runtime, hurried, jobs[first : first + BATCH], profiler.observe, first)


def text_jobs(count: int) -> list[dict[str, Array]]:
    return [{"text": np.array([text], object)} for text in texts(count)]


def number_jobs(count: int) -> list[dict[str, Array]]:
    numbers = np.random.default_rng(7).standard_normal((count, 1, 384)).astype(np.float32)
    return [{"x": rows} for rows in numbers]


def settle(optimizer: InferenceOptimizer) -> None:
    while optimizer.tick():
        pass


def line_of(optimizer: InferenceOptimizer, model: str, step: str) -> dict[str, object]:
    (entry,) = optimizer.report()[model]
    steps = entry["steps"]
    assert isinstance(steps, list)
    return next(line for line in steps if line["step"] == step)


def figures_of(line: Mapping[str, object]) -> Mapping[str, float]:
    figures = line["evidence"]
    assert isinstance(figures, dict)
    assert figures, line["reason"]
    return figures


def test_level_1_tokenises_repeats_once(minilm: EncoderRuntime, tmp_path: Path):
    """With the cache on, the tokenizer is called for new texts only, and every vector stays equal (AR-053)."""
    optimizer = optimizer_of(tmp_path, max_level=1)
    profiler = optimizer.attach("minilm", minilm, minilm.content_hash, BATCH)
    tokeniser = minilm.tokeniser
    assert tokeniser is not None
    sentences = texts(8)
    before = embed(minilm, sentences)
    embed(minilm, sentences)
    called = tokeniser.tokenised
    assert called >= 16
    serve(minilm, profiler, text_jobs(JOBS))
    settle(optimizer)
    assert line_of(optimizer, "minilm", "tokenizer-cache")["state"] == "on"
    called = tokeniser.tokenised
    for _ in range(3):
        np.testing.assert_array_equal(embed(minilm, sentences), before)
    assert tokeniser.tokenised - called <= len(sentences)


@pytest.mark.skipif(not has_fast_bf16(), reason="this CPU has no units for bf16")
def test_level_3_serves_bf16_once_its_vectors_matched(
    minilm: EncoderRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Real traffic, real goldens: a faster bf16 takes over, and every vector points where fp32's does (AR-056)."""
    clock = CallClock(minilm, cost_s=0.5)
    monkeypatch.setattr(minilm, "candidates", clock.only("bf16"))
    optimizer = optimizer_of(tmp_path, max_level=3, clock=clock)
    profiler = optimizer.attach("minilm", minilm, minilm.content_hash, BATCH)
    sentences = texts(24)
    eager = embed(minilm, sentences)
    serve(minilm, profiler, text_jobs(JOBS))
    settle(optimizer)
    line = line_of(optimizer, "minilm", "bf16")
    assert (minilm.forms.name, line["state"]) == ("bf16", "on"), line["reason"]
    assert figures_of(line)["embedding.min_cosine"] >= 0.999
    assert (embed(minilm, sentences) * eager).sum(axis=1).min() >= 0.999
    assert not np.array_equal(embed(minilm, sentences), eager)


@pytest.mark.parametrize(("cost_s", "form"), [(0.8, "prepacked"), pytest.param(0.95, "eager", marks=pytest.mark.slow)])
def test_default_level_serves_packed_weights_where_they_are_faster(
    minilm: EncoderRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cost_s: float, form: str
):
    """With the default settings, a form of the same numbers takes over if it gains 1.1 times (ES-009, AR-055)."""
    clock = CallClock(minilm, cost_s)
    monkeypatch.setattr(minilm, "candidates", clock.only("prepacked"))
    optimizer = optimizer_of(tmp_path, clock=clock)
    profiler = optimizer.attach("minilm", minilm, minilm.content_hash, BATCH)
    sentences = texts(24)
    eager = embed(minilm, sentences)
    serve(minilm, profiler, text_jobs(JOBS))
    settle(optimizer)
    line = line_of(optimizer, "minilm", "prepacked")
    state = "on" if form == "prepacked" else "refused"
    assert (minilm.forms.name, line["state"], line["level"]) == (form, state, 2), line["reason"]
    assert line["gain"] == pytest.approx(1 / cost_s, abs=1e-3)
    assert figures_of(line)["embedding.max_error_ratio"] <= 1
    made = line["made"]
    assert isinstance(made, dict)
    assert (made["packed_layers"], made["fused_activations"]) == (24, 6)
    assert made["memory_growth_mb"] == pytest.approx(53.87, abs=0.01)
    before = minilm.call_count
    np.testing.assert_allclose(embed(minilm, sentences), eager, atol=1e-5)
    assert (minilm.call_count == before) is (form == "prepacked")


def test_wrongly_packed_weights_never_serve(minilm: EncoderRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Square weights are packed transposed: the gate refuses the form, and the reference keeps serving (AR-055)."""
    clock = CallClock(minilm, cost_s=0.1)
    monkeypatch.setattr(minilm, "candidates", clock.only("prepacked"))
    right = prepacked._packed

    def transposed(weight: torch.Tensor) -> torch.Tensor:
        return right(weight.t().contiguous() if weight.shape[0] == weight.shape[1] else weight)

    monkeypatch.setattr(prepacked, "_packed", transposed)
    optimizer = optimizer_of(tmp_path, clock=clock)
    profiler = optimizer.attach("minilm", minilm, minilm.content_hash, BATCH)
    serve(minilm, profiler, text_jobs(JOBS))
    settle(optimizer)
    line = line_of(optimizer, "minilm", "prepacked")
    assert (minilm.forms.name, line["state"], line["gain"]) == ("eager", "refused", None)
    assert figures_of(line)["embedding.max_error_ratio"] > 1000


@pytest.mark.slow
def test_default_level_serves_a_graph_of_onnx_runtime_where_it_is_faster(
    minilm: EncoderRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """ONNX Runtime in fp32 keeps the numbers of the model, so it is a form of level 2 (ES-009)."""
    require_module("onnxruntime")
    clock = CallClock(minilm, cost_s=0.5)
    monkeypatch.setattr(minilm, "candidates", clock.only("onnx"))
    optimizer = optimizer_of(tmp_path, clock=lambda: HASTE * clock())
    profiler = optimizer.attach("minilm", minilm, minilm.content_hash, BATCH)
    sentences = texts(24)
    eager = embed(minilm, sentences)
    serve(minilm, profiler, text_jobs(JOBS))
    settle(optimizer)
    line = line_of(optimizer, "minilm", "onnx")
    assert (minilm.forms.name, line["state"], line["level"]) == ("onnx", "on", 2), line["reason"]
    assert figures_of(line)["embedding.max_error_ratio"] <= 1
    np.testing.assert_allclose(embed(minilm, sentences), eager, atol=1e-5)


@pytest.mark.slow
def test_int8_of_minilm_is_refused(minilm: EncoderRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Uncalibrated int8 turns the vectors: the gate says by how much, and fp32 keeps serving (AR-056)."""
    require_module("onnxruntime")
    monkeypatch.setattr(minilm, "candidates", only(minilm, "int8"))
    optimizer = optimizer_of(tmp_path, max_level=3)
    profiler = optimizer.attach("minilm", minilm, minilm.content_hash, BATCH)
    serve(minilm, profiler, text_jobs(JOBS))
    settle(optimizer)
    line = line_of(optimizer, "minilm", "int8")
    assert (minilm.forms.name, line["state"]) == ("eager", "refused")
    assert 0.8 < figures_of(line)["embedding.min_cosine"] < 0.999
    assert str(line["reason"]).startswith("embedding: min_cosine 0.")


def test_goldens_cost_no_call_of_the_model(mlp: PyTorchRuntime, tmp_path: Path):
    """The model is called once for each batch that is served, and the goldens are there (AR-061); `levels` says so."""
    optimizer = optimizer_of(tmp_path, max_level=0)
    profiler = optimizer.attach("mlp", mlp, mlp.content_hash, BATCH)
    before = mlp.call_count
    serve(mlp, profiler, number_jobs(JOBS))
    settle(optimizer)
    assert mlp.call_count == before + JOBS // BATCH
    assert profiler.goldens is not None
    assert len(profiler.goldens) > 0
    (entry,) = optimizer.report()["mlp"]
    assert entry["counts"] == {"model_calls": mlp.call_count}


@pytest.mark.skipif(not has_fast_bf16(), reason="this CPU has no units for bf16")
def test_logits_in_bf16_keep_their_winners(mlp: PyTorchRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A classifier's form is judged by agreement and by how far a logit moved."""
    monkeypatch.setattr(mlp, "candidates", only(mlp, "bf16"))
    optimizer = optimizer_of(tmp_path, max_level=3)
    profiler = optimizer.attach("mlp", mlp, mlp.content_hash, BATCH)
    serve(mlp, profiler, number_jobs(JOBS))
    settle(optimizer)
    figures = figures_of(line_of(optimizer, "mlp", "bf16"))
    assert figures["logits.agreement"] >= 0.99
    assert 0 < figures["logits.max_delta"] <= 0.02


def test_operator_looks_inside_a_forward(mlp: PyTorchRuntime, tmp_path: Path):
    """On request the optimizer profiles golden batches beside the traffic (CX-046)."""
    optimizer = optimizer_of(tmp_path, max_level=0)
    profiler = optimizer.attach("mlp", mlp, mlp.content_hash, BATCH)
    early = optimizer.ask("mlp", "trace")
    settle(optimizer)
    assert early.result(0) == "mlp/1: it cannot be traced: no golden job fits into a batch"
    serve(mlp, profiler, number_jobs(JOBS))
    answer = optimizer.ask("mlp", "trace")
    settle(optimizer)
    assert "aten::addmm" in answer.result(0)


@pytest.mark.slow
def test_compiled_form_is_built_beside_the_traffic_and_judged(
    mlp: PyTorchRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The compiled form passes the gate at the setting's tolerance. Whether it serves depends on its speed."""
    config = InferenceConfig().compilation.model_copy(update={"cache_dir": tmp_path / "cache"})
    compiler = TorchCompiler(config, tmp_path / "compilation.key")
    candidates = mlp.candidates
    monkeypatch.setattr(mlp, "candidates", lambda _: {"compiled": candidates(compiler)["compiled"]})
    optimizer = optimizer_of(tmp_path, max_level=2, compiler=compiler)
    profiler = optimizer.attach("mlp", mlp, mlp.content_hash, BATCH)
    serve(mlp, profiler, number_jobs(JOBS))
    settle(optimizer)
    line = line_of(optimizer, "mlp", "compiled")
    assert figures_of(line)["logits.max_error_ratio"] <= 1
    assert mlp.forms.name == ("compiled" if line["state"] == "on" else "eager")
    made = line["made"]
    assert isinstance(made, dict)
    assert (made["backend"], made["graphs"], made["was_warm"]) == ("inductor", 1, False)
    assert ("uncovered_calls" in mlp.counts()) == (line["state"] == "on")
    compiler.stop()


def only(
    runtime: EncoderRuntime | PyTorchRuntime, name: str
) -> Callable[[TorchCompiler | None], dict[str, Callable[[], Forward]]]:
    """Only this one of the runtime's candidates, because each takes time to build."""
    builder = runtime.candidates(None)[name]
    return lambda _: {name: builder}
