"""Packages of every format, small enough to load within a second.

Those of numbers compute one function, `x` float32 (batch, 4) -> `y` = x WEIGHT + BIAS, each in its own format, so that
any of them can be compared with `affine`. The classifier is a real BERT of 16 dimensions with three labels.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import dedent
from typing import Any

import numpy as np
import onnx
import torch
import transformers
import yaml
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file

from penstock.registry.package import load_package
from penstock.registry.tensors import Array
from penstock.workers.runtime import Runtime, open_runtime

WEIGHT = np.random.default_rng(5).standard_normal((4, 4)).astype(np.float32)
BIAS = np.random.default_rng(6).standard_normal(4).astype(np.float32)
LABELS = ("good", "fair", "poor")
MAX_TOKENS = 32

_NUMBERS = [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}]
_ANSWERS = [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}]
_PYTHON = """
import numpy as np
WEIGHT = np.array({weight}, np.float32)
BIAS = np.array({bias}, np.float32)
def build():
    return lambda inputs: {{"y": inputs["x"] @ WEIGHT + BIAS}}
"""
_PYTORCH = """
import torch
def build():
    return torch.nn.Linear(4, 4)
"""


def affine(x: Array) -> Array:
    """What every package of numbers answers."""
    return x @ WEIGHT + BIAS


def write(root: Path, name: str, fields: Mapping[str, Any], source: str = "") -> Path:
    """A package with these fields in its model.yaml, a `name` among them if they have one, and `source` as model.py."""
    name = fields.get("name", name)
    folder = root / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    declared = {"name": name, "version": "1", "inputs": _NUMBERS, "outputs": _ANSWERS}
    (folder / "model.yaml").write_text(yaml.safe_dump(declared | dict(fields), sort_keys=False))
    if source:
        (folder / "model.py").write_text(dedent(source))
    return folder


def write_python(root: Path, **fields: Any) -> Path:
    source = _PYTHON.format(weight=WEIGHT.tolist(), bias=BIAS.tolist())
    return write(root, "affine", {"format": "python", "entrypoint": "model:build"} | fields, source)


def write_pytorch(root: Path, source: str = _PYTORCH, **fields: Any) -> Path:
    """The entry point builds a module, its numbers come from safetensors."""
    declared = {"format": "pytorch", "entrypoint": "model:build", "weights": "weights.safetensors"}
    folder = write(root, "affine", declared | fields, source)
    save_file(_state(), folder / "weights.safetensors")
    return folder


def write_torchscript(root: Path, module: torch.nn.Module | None = None, **fields: Any) -> Path:
    folder = write(root, "affine", {"format": "torchscript", "weights": "model.pt"} | fields)
    if module is None:
        module = torch.nn.Linear(4, 4)
        module.load_state_dict(_state())
    script: Any = torch.jit.script
    script(module).save(folder / "model.pt")
    return folder


def write_onnx(root: Path, graph: onnx.ModelProto | None = None, **fields: Any) -> Path:
    folder = write(root, "affine", {"format": "onnx", "weights": "model.onnx"} | fields)
    onnx.save(graph or affine_graph(), folder / "model.onnx")
    return folder


def affine_graph(bias: Array = BIAS) -> onnx.ModelProto:
    """y = x weight + bias as an ONNX graph."""
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"]),
        helper.make_node("Add", ["product", "bias"], ["y"]),
    ]
    constants = [numpy_helper.from_array(WEIGHT, "weight"), numpy_helper.from_array(bias, "bias")]
    graph = helper.make_graph(nodes, "affine", values[:1], values[1:], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def write_classifier(root: Path, *, task: str = "text-classification", **fields: Any) -> Path:
    """A tiny BERT with random weights from a fixed seed, and a tokenizer of single letters."""
    outputs = [
        {"name": "label", "dtype": "string", "shape": ["batch"]},
        {"name": "score", "dtype": "float32", "shape": ["batch"]},
    ]
    declared = {
        "format": "transformers",
        "task": task,
        "source": {"path": "weights"},
        "inputs": [{"name": "text", "dtype": "string", "shape": ["batch"]}],
        "outputs": outputs,
    }
    folder = write(root, "classifier", declared | fields)
    heads = {"fill-mask": "BertForMaskedLM", "token-classification": "BertForTokenClassification"}
    save_bert(folder / "weights", heads.get(task, "BertForSequenceClassification"))
    return folder


def write_encoder(root: Path, **fields: Any) -> Path:
    """The same BERT without a head: embeddings of 16 dimensions."""
    declared = {
        "format": "transformers",
        "source": {"path": "weights"},
        "inputs": [{"name": "text", "dtype": "string", "shape": ["batch"]}],
        "outputs": [{"name": "embedding", "dtype": "float32", "shape": ["batch", 16]}],
    }
    folder = write(root, "encoder", declared | fields)
    save_bert(folder / "weights", "BertModel")
    return folder


def write_steps(root: Path, **fields: Any) -> Path:
    """A pipeline of the same function in two steps: x WEIGHT as an ONNX graph, then + BIAS as TorchScript."""
    steps = [
        {"package": "product", "inputs": {"x": "x"}, "outputs": {"y": "product"}},
        {"package": "sum", "inputs": {"x": "product"}, "outputs": {"y": "y"}},
    ]
    folder = write(root, "steps", {"format": "pipeline", "steps": steps} | fields)
    with TemporaryDirectory() as alone:
        shutil.move(write_onnx(Path(alone), affine_graph(np.zeros(4, np.float32)), name="product"), folder / "product")
        module = torch.nn.Linear(4, 4)
        module.load_state_dict({"weight": torch.eye(4), "bias": torch.from_numpy(BIAS)})
        shutil.move(write_torchscript(Path(alone), module, name="sum"), folder / "sum")
    return folder


def save_bert(folder: Path, architecture: str) -> None:
    """Writes model and tokenizer as transformers does."""
    folder.mkdir()
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{letter}" for letter in letters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    transformers.BertTokenizer(vocab=str(folder / "vocab.txt")).save_pretrained(folder)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=MAX_TOKENS,
        id2label=dict(enumerate(LABELS)),
        label2id={label: number for number, label in enumerate(LABELS)},
        # Answers of untrained weights differ little from text to text with the usual small numbers.
        initializer_range=1.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(4)
        getattr(transformers, architecture)(config).save_pretrained(folder)


def opened(folder: Path, *, threads: int = 1, **how: Any) -> Runtime:
    """The package's runtime, loaded onto the CPU."""
    runtime = open_runtime(load_package(folder), **how)
    runtime.load("cpu", threads)
    return runtime


def answers(runtime: Runtime, **inputs: Array) -> dict[str, Array]:
    """One job alone."""
    return runtime.run(runtime.prepare([inputs]))


WRITERS: dict[str, Callable[..., Path]] = {
    "python": write_python,
    "pytorch": write_pytorch,
    "torchscript": write_torchscript,
    "onnx": write_onnx,
    "encoder": write_encoder,
    "pipeline": write_classifier,
}
"""By format; the last two take text."""


def _state() -> dict[str, torch.Tensor]:
    return {"weight": torch.from_numpy(WEIGHT.T.copy()), "bias": torch.from_numpy(BIAS)}
