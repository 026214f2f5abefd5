"""A model as an ONNX graph: valid, of dynamic shapes, and the same numbers (AR-056)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import load_package
from penstock.registry.settings_sections import InferenceConfig
from penstock.workers.levels.optimizer import InferenceOptimizer
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime import open_runtime
from penstock.workers.runtime.export import Graph, export_onnx, open_exported
from penstock.workers.runtime.exporter import export_package
from penstock.workers.runtime.forms import Forward
from penstock.workers.runtime.pytorch import PyTorchRuntime
from tests.packages import write_package
from tests.servers import ROOT, require_module, wait_until
from tests.workers.levels.fake_model import Clock, served

require_module("onnx")
onnxruntime = require_module("onnxruntime")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")


def opened(folder: Path) -> Any:
    runtime = open_runtime(load_package(folder))
    runtime.load("cpu", 1)
    return runtime


def write_module(root: Path, name: str, body: str) -> Path:
    """A torch package of x (batch, 4) -> y (batch, 4)."""
    folder = write_package(root, name, f"import torch\n{dedent(body)}\ndef build():\n    return Module()\n")
    text = (folder / "model.yaml").read_text().replace("format: python", "format: pytorch")
    (folder / "model.yaml").write_text(text)
    return folder


@pytest.fixture(scope="module")
def mlp() -> Iterator[Any]:
    runtime = opened(ROOT / "models" / "mlp" / "1")
    yield runtime
    runtime.close()


class Exported(NamedTuple):
    """A graph of the sample, and how far its logits are off."""

    file: Path
    difference: float

    def session(self) -> Any:
        return onnxruntime.InferenceSession(str(self.file), providers=["CPUExecutionProvider"])


@pytest.fixture(scope="module")
def plain(mlp: Any, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    file = tmp_path_factory.mktemp("graph") / "mlp.onnx"
    return Exported(file, export_onnx(mlp, file)["logits"])


@pytest.fixture(scope="module")
def int8(mlp: Any, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    file = tmp_path_factory.mktemp("graph") / "mlp8.onnx"
    return Exported(file, export_onnx(mlp, file, is_int8=True)["logits"])


def test_graph_answers_as_the_model_for_every_batch(mlp: Any, plain: Exported):
    """Traced with two rows, it serves one and a hundred; its output has a name that clashes with nothing."""
    assert plain.difference < 1e-5
    session = plain.session()
    assert [one.name for one in session.get_outputs()] == ["logits_out"]
    for rows in (1, 100):
        x = np.random.default_rng(rows).standard_normal((rows, 384)).astype(np.float32)
        expected = mlp.run(mlp.prepare([{"x": x}]))["logits"]
        np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)


def test_int8_graph_is_smaller_and_says_how_far_it_is_off(plain: Exported, int8: Exported):
    """Dynamic quantisation takes a quarter of the bytes, and the loss of precision is returned."""
    assert int8.file.stat().st_size < 0.4 * plain.file.stat().st_size
    assert plain.difference < int8.difference < 0.1


@pytest.mark.parametrize(
    ("form", "int8_delta", "state"), [("onnx", 0.1, "on"), ("int8", 0.1, "on"), ("int8", 1e-3, "refused")]
)
def test_torch_model_is_answered_by_a_graph_within_the_tolerance_only(
    form: str,
    int8_delta: float,
    state: str,
    plain: Exported,
    int8: Exported,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """A classifier of format pytorch is offered as a graph: fp32 at the setting's tolerance, int8 at that of int8, as
    its logits move by a hundredth; where less is allowed the model goes on as it is (AR-056)."""
    monkeypatch.setattr("penstock.safety.validators.selection._INT8_DELTA", int8_delta)
    monkeypatch.setattr(
        "penstock.workers.runtime.pytorch.open_exported",
        lambda _runtime, _threads, *, is_int8: graph_of((int8 if is_int8 else plain).session()),
    )
    runtime, clock = opened(ROOT / "models" / "mlp" / "1"), Clock()
    assert isinstance(runtime, PyTorchRuntime)
    inputs = numbers(runtime)
    monkeypatch.setattr(runtime, "_forward", slow(runtime._forward, clock))
    monkeypatch.setattr(runtime, "candidates", only(runtime, form))
    line = tried(runtime, form, tmp_path, clock, inputs)
    assert (line["state"], runtime.forms.name) == (state, form if state == "on" else "eager"), line["reason"]
    if form == "int8":
        assert 1e-3 < line["evidence"]["logits.max_delta"] <= 0.1
    if state == "refused":
        assert line["reason"].startswith("logits: max_delta 0.0")
        return
    called = runtime.call_count
    prepared = runtime.prepare([{"x": inputs[0]}])
    answer, eager = runtime.run(prepared)["logits"], runtime.forms.reference(prepared)["logits"]
    assert runtime.call_count == called + 1
    assert np.abs(answer - eager).max() <= (1e-5 if form == "onnx" else 0.1) * np.abs(eager).max()
    runtime.close()


@pytest.mark.parametrize("missing", ["onnx", "onnxscript", "onnxruntime"])
def test_without_the_packages_a_graph_is_no_candidate(mlp: Any, monkeypatch: pytest.MonkeyPatch, missing: str):
    """An optional package that is not installed costs no trial and no error: both forms are absent."""
    assert {"onnx", "int8"} <= mlp.candidates(None).keys()
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else find(name))
    assert mlp.candidates(None).keys().isdisjoint({"onnx", "int8"})


def numbers(runtime: PyTorchRuntime) -> np.ndarray:
    """Inputs of 80 jobs, each of a clear class: a trial draws its samples at random, and int8 must not flip one."""
    rows = np.random.default_rng(7).standard_normal((400, 384)).astype(np.float32)
    second, first = np.sort(runtime.run(runtime.prepare([{"x": rows}]))["logits"], axis=1)[:, -2:].T
    return rows[np.argsort(second - first)[:80], np.newaxis]


def tried(runtime: PyTorchRuntime, form: str, home: Path, clock: Clock, inputs: np.ndarray) -> dict[str, Any]:
    """The report's line of a form, after traffic and a trial: of fp32 at the default level, of int8 at level 3."""
    optimizer = InferenceOptimizer(
        InferenceConfig() if form == "onnx" else InferenceConfig(max_level=3),
        home=home,
        device="cpu",
        audit=lambda _: None,
        metrics=InferenceMetrics((1.0,)),
        compiler=None,
        clock=clock,
    )
    profiler = optimizer.attach("mlp", runtime, runtime.content_hash, 4)
    for first in range(0, 80, 4):
        served(runtime, clock, [{"x": rows} for rows in inputs[first : first + 4]], profiler.observe, first)
    while optimizer.tick():
        pass
    (entry,) = optimizer.report()["mlp"]
    return next(line for line in entry["steps"] if line["step"] == form)  # type: ignore[attr-defined]


def graph_of(session: Any) -> Graph:
    """A graph like the one of `open_exported`."""
    return lambda inputs: session.run(None, dict(inputs))


def slow(forward: Callable[..., Any], clock: Clock) -> Callable[..., Any]:
    """The same, ten seconds later."""

    def later(*arguments: Any) -> Any:
        clock.now += 10.0
        return forward(*arguments)

    return later


def only(runtime: PyTorchRuntime, form: str) -> Callable[[object], Mapping[str, Callable[[], Forward]]]:
    """Only this one of the runtime's candidates."""
    builder = runtime.candidates(None)[form]
    return lambda _: {form: builder}


def test_child_process_exports_what_its_hash_names(mlp: Any):
    """A worker gets its graph from another process, so that nothing is traced beside forwards."""
    graph = open_exported(mlp, 1, is_int8=False)
    x = np.ones((3, 384), np.float32)
    np.testing.assert_allclose(graph({"x": x})[0], mlp.run(mlp.prepare([{"x": x}]))["logits"], rtol=1e-4, atol=1e-5)


def test_child_refuses_files_that_changed(models_root: Path):
    """A package whose files were changed since it was loaded is not exported."""
    folder = write_module(
        models_root, "doubler", "class Module(torch.nn.Module):\n    def forward(self, x): return x * 2"
    )
    runtime = opened(folder)
    with (folder / "model.py").open("a") as source:
        source.write("\nCHANGED = True\n")
    with pytest.raises(ConfigurationError, match="its files differ"):
        open_exported(runtime, 1, is_int8=False)


@pytest.mark.slow
def test_a_package_of_several_instances_is_exported_like_one(models_root: Path, tmp_path: Path):
    """The number of copies in a worker is no matter of the graph."""
    folder = write_module(models_root, "twin", "class Module(torch.nn.Module):\n    def forward(self, x): return x * 2")
    with (folder / "model.yaml").open("a") as file:
        file.write("instances: 2\n")
    package = load_package(folder)
    differences = export_package(package, package.manifest().content_hash, tmp_path / "twin.onnx")
    assert differences == {"y": 0.0}


def test_model_of_other_paths_for_other_shapes_is_refused(models_root: Path, tmp_path: Path):
    """A graph has no guards: a model whose graph would be wrong for some numbers of rows is not exported."""
    body = """
    class Module(torch.nn.Module):
        def forward(self, x):
            return x if x.shape[0] % 4 == 3 else x * 2
    """
    runtime = opened(write_module(models_root, "fourth", body))
    with pytest.raises(ConfigurationError, match=r"^fourth/1: cannot be exported to ONNX .* need a graph of their own"):
        export_onnx(runtime, tmp_path / "model.onnx")


def test_model_without_a_graph_is_refused_in_one_line(models_root: Path, tmp_path: Path):
    """Control flow that depends on values has no graph; the reason is one line."""
    body = """
    class Module(torch.nn.Module):
        def forward(self, x):
            return x * 2 if float(x.sum()) > 0 else x
    """
    runtime = opened(write_module(models_root, "branching", body))
    with pytest.raises(ConfigurationError, match=r"^branching/1: cannot be exported to ONNX \(\w+: ") as refused:
        export_onnx(runtime, tmp_path / "model.onnx")
    assert "\n" not in str(refused.value)


def test_exporter_that_hangs_is_ended_with_what_it_started(mlp: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It has a time limit, knows no secrets of the worker, and leaves no process behind."""
    program, seen = tmp_path / "python", tmp_path / "seen"
    program.write_text(
        f"#!/bin/sh\nenv > {seen}.part\nsleep 600 &\necho $! >> {seen}.part\nmv {seen}.part {seen}\nwait\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr("sys.executable", str(program))
    monkeypatch.setenv("PENSTOCK_SIGNING_KEYS", "main:c2VjcmV0")
    with pytest.raises(ConfigurationError, match=r"^mlp/1: the exporter's process took too long$"):
        open_exported(mlp, 1, is_int8=False, timeout_s=1.0)
    *environment, pid = seen.read_text().split("\n")[:-1]
    assert [line for line in environment if line.startswith("PENSTOCK_")] == []
    stat = Path(f"/proc/{pid}/stat")
    wait_until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z", 5, "its end")
