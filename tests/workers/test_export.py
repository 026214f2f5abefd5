"""A model as an ONNX graph: valid, of dynamic shapes, and the same numbers (AR-056)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

from registry.errors import ConfigurationError
from registry.package import load_package
from tests.packages import write_package
from tests.servers import ROOT
from workers.runtime import open_runtime
from workers.runtime.export import export_onnx, open_exported

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

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


def test_graph_answers_as_the_model_for_every_batch(mlp: Any, tmp_path: Path):
    """Traced with two rows, it serves one and a hundred; its output has a name that clashes with nothing."""
    file = tmp_path / "mlp.onnx"
    assert export_onnx(mlp, file)["logits"] < 1e-5
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_outputs()] == ["logits_out"]
    for rows in (1, 100):
        x = np.random.default_rng(rows).standard_normal((rows, 384)).astype(np.float32)
        expected = mlp.run(mlp.prepare([{"x": x}]))["logits"]
        np.testing.assert_allclose(session.run(None, {"x": x})[0], expected, rtol=1e-4, atol=1e-5)


def test_int8_graph_is_smaller_and_says_how_far_it_is_off(mlp: Any, tmp_path: Path):
    """Dynamic quantisation takes a quarter of the bytes; what it costs in precision is returned."""
    plain, int8 = tmp_path / "mlp.onnx", tmp_path / "mlp8.onnx"
    exact = export_onnx(mlp, plain)["logits"]
    rough = export_onnx(mlp, int8, is_int8=True)["logits"]
    assert int8.stat().st_size < 0.4 * plain.stat().st_size
    assert exact < rough < 0.1


def test_child_process_exports_what_its_hash_names(mlp: Any):
    """A worker gets its graph from another process, so that nothing is traced beside forwards."""
    graph = open_exported(mlp, 1, is_int8=False)
    x = np.ones((3, 384), np.float32)
    np.testing.assert_allclose(graph({"x": x})[0], mlp.run(mlp.prepare([{"x": x}]))["logits"], rtol=1e-4, atol=1e-5)


def test_child_refuses_files_that_changed(models_root: Path):
    """What is exported is what serves: a package whose files were changed since it was loaded is not exported."""
    folder = write_module(
        models_root, "doubler", "class Module(torch.nn.Module):\n    def forward(self, x): return x * 2"
    )
    runtime = opened(folder)
    with (folder / "model.py").open("a") as source:
        source.write("\nCHANGED = True\n")
    with pytest.raises(ConfigurationError, match="its files are not those"):
        open_exported(runtime, 1, is_int8=False)


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
