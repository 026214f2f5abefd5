"""ONNX graphs: names and dtypes against the declaration, external data, defaults, devices, and a missing library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from penstock.registry.errors import ConfigurationError, OutOfMemory
from penstock.registry.package import load_package
from penstock.workers.runtime import open_runtime
from penstock.workers.runtime.onnx import OnnxRuntime
from tests.workers.runtime.formats import WEIGHT, affine, affine_graph, answers, opened, write_onnx

NUMBERS = {"dtype": "float32", "shape": ["batch", 4]}
X = {"name": "x", **NUMBERS}


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"inputs": [{"name": "z", **NUMBERS}]}, "inputs: found z, expected x as the graph says"),
        ({"inputs": [X, {"name": "mask", **NUMBERS}]}, "inputs: found mask, x, expected x as the graph says"),
        (
            {"inputs": [{"name": "x", "dtype": "float16", "shape": ["batch", 4]}]},
            "input x: found float16, expected float32 as the graph says",
        ),
        ({"outputs": [{"name": "z", **NUMBERS}]}, "outputs: found z, expected y as the graph says"),
        (
            {"outputs": [{"name": "y", "dtype": "int64", "shape": ["batch", 4]}]},
            "output y: found int64, expected float32 as the graph says",
        ),
        (
            {"precision": "fp16"},
            "precision: found fp16, expected auto for format onnx: a graph has the precision that it was exported with",
        ),
    ],
)
def test_graph_that_differs_from_its_declaration_is_refused(models_root: Path, fields: dict[str, Any], text: str):
    """Names and dtypes are compared before the first forward, and the error names the one that differs."""
    with pytest.raises(ConfigurationError) as refused:
        opened(write_onnx(models_root, **fields))
    assert str(refused.value) == f"affine/1: {text}"


def graph_with_offset(*, has_default: bool) -> onnx.ModelProto:
    """y = x weight + bias, whose bias a caller may or must give."""
    model = affine_graph()
    model.graph.input.append(helper.make_tensor_value_info("bias", TensorProto.FLOAT, ["batch", 4]))
    if has_default:
        model.graph.initializer[1].dims[:] = [1, 4]
    else:
        del model.graph.initializer[1]
    return model


def test_input_with_a_default_may_be_left_out(models_root: Path):
    """An optional input of the package is one that the graph has a value for."""
    bias = {"name": "bias", "optional": True, **NUMBERS}
    runtime = opened(write_onnx(models_root, graph_with_offset(has_default=True), inputs=[X, bias]))
    x = np.random.default_rng(3).standard_normal((1, 4), np.float32)
    np.testing.assert_allclose(answers(runtime, x=x)["y"], affine(x), rtol=1e-5, atol=1e-6)
    zero = np.zeros((1, 4), np.float32)
    np.testing.assert_allclose(answers(runtime, x=x, bias=zero)["y"], x @ WEIGHT, rtol=1e-5, atol=1e-6)


def test_input_without_a_default_may_not_be_optional(models_root: Path):
    """Otherwise every job that leaves it out would fail in its forward."""
    bias = {"name": "bias", "optional": True, **NUMBERS}
    folder = write_onnx(models_root, graph_with_offset(has_default=False), inputs=[X, bias])
    with pytest.raises(ConfigurationError, match=r"input bias: found optional, expected it in every job, as the graph"):
        opened(folder)


def write_external(root: Path, location: str) -> Path:
    """The graph with its weights in `weights.bin`, which it says lies at `location`."""
    folder = write_onnx(root)
    onnx.save(
        affine_graph(),
        folder / "model.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=0,
    )
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            if entry.key == "location":
                entry.value = location
    (folder / "model.onnx").write_bytes(model.SerializeToString())
    return folder


def test_weights_beside_the_graph_are_part_of_the_package(models_root: Path):
    """They are loaded, counted, and hashed: other weights are other content."""
    folder = write_external(models_root, "weights.bin")
    runtime = opened(folder)
    x = np.random.default_rng(3).standard_normal((2, 4), np.float32)
    np.testing.assert_allclose(answers(runtime, x=x)["y"], affine(x), rtol=1e-5, atol=1e-6)
    assert runtime.memory_bytes >= (folder / "model.onnx").stat().st_size + WEIGHT.nbytes
    with (folder / "weights.bin").open("r+b") as weights:
        weights.write(b"\0\0\0\0")
    assert opened(folder).content_hash != runtime.content_hash


def test_weights_that_are_written_to_change_no_answer(models_root: Path):
    """A write to the file of a serving model does not change its outputs (AR-021)."""
    folder = write_external(models_root, "./weights.bin")
    runtime = opened(folder)
    x = np.random.default_rng(3).standard_normal((2, 4), np.float32)
    with (folder / "weights.bin").open("r+b") as weights:
        weights.write(b"\0" * (WEIGHT.nbytes + 16))
    np.testing.assert_allclose(answers(runtime, x=x)["y"], affine(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/hostname", "absent.bin"])
def test_weights_outside_the_package_are_refused(models_root: Path, location: str):
    """A graph reads no file but those of its package."""
    folder = write_external(models_root, location)
    (folder.parent / "weights.bin").write_bytes((folder / "weights.bin").read_bytes())
    with pytest.raises(ConfigurationError, match=r"^affine/1: .*model\.onnx"):
        opened(folder)


def test_threads_are_those_that_the_worker_grants(models_root: Path):
    """One forward takes no more cores than it was given, and idle threads do not spin."""
    runtime = opened(write_onnx(models_root), threads=2)
    assert isinstance(runtime, OnnxRuntime)
    assert runtime.model is not None
    options = runtime.model.get_session_options()
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_missing_library_is_told_with_what_to_install(models_root: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker without ONNX Runtime refuses the package in one line and serves the others."""
    folder = write_onnx(models_root)
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(
        ConfigurationError, match=r"^onnxruntime is not installed\. Expected: pip install '\.\[onnx\]'$"
    ):
        opened(folder)


@pytest.mark.skipif("CUDAExecutionProvider" in onnxruntime.get_available_providers(), reason="this build knows CUDA")
def test_device_that_the_build_does_not_know_is_refused(models_root: Path):
    """It would fall back to the CPU without a word."""
    runtime = open_runtime(load_package(write_onnx(models_root)))
    with pytest.raises(ConfigurationError, match=r"knows no CUDA\. Expected: pip install onnxruntime-gpu$"):
        runtime.load("cuda:0", 1)


def test_batch_that_does_not_fit_is_told_apart(models_root: Path):
    """The drain halves a batch on OutOfMemory: a product of a million rows with themselves fits no machine."""
    model = affine_graph()
    del model.graph.node[:]
    model.graph.node.extend(
        [
            helper.make_node("Transpose", ["x"], ["columns"], perm=[1, 0]),
            helper.make_node("MatMul", ["x", "columns"], ["square"]),
            helper.make_node("MatMul", ["square", "x"], ["product"]),
            helper.make_node("Add", ["product", "bias"], ["y"]),
        ]
    )
    runtime = opened(write_onnx(models_root, model))
    with pytest.raises(OutOfMemory, match="does not fit the device"):
        answers(runtime, x=np.zeros((4_000_000, 4), np.float32))
