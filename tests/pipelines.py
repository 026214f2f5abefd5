"""Pipelines for tests, written into a models root: their steps are `python` packages of NumPy only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import yaml

Tensors = Mapping[str, tuple[str, Sequence[int | str]]]


def tensors(declared: Tensors) -> list[dict[str, Any]]:
    """Inputs or outputs as model.yaml has them."""
    return [{"name": name, "dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in declared.items()]


X: Tensors = {"x": ("float32", ["batch", 4])}
Y: Tensors = {"y": ("float32", ["batch", 4])}
DOUBLE = """
def build():
    return lambda inputs: {"y": inputs["x"] * 2}
"""
CHAIN = [
    {"package": "first", "inputs": {"x": "x"}, "outputs": {"y": "middle"}},
    {"package": "second", "inputs": {"x": "middle"}, "outputs": {"y": "y"}},
]
"""Two steps, each x -> y."""


def write_step(
    pipeline: Path, path: str, source: str = DOUBLE, *, inputs: Tensors = X, outputs: Tensors = Y, **fields: Any
) -> Path:
    """A step of a pipeline; returns its folder."""
    folder = pipeline / path
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "name": folder.name,
        "version": "7",
        "format": "python",
        "entrypoint": "model:build",
        "inputs": tensors(inputs),
        "outputs": tensors(outputs),
        **fields,
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    (folder / "model.py").write_text(dedent(source))
    return folder


def write_pipeline(
    root: Path,
    name: str = "chain",
    *,
    steps: Sequence[Mapping[str, Any]] = CHAIN,
    inputs: Tensors = X,
    outputs: Tensors = Y,
    **fields: Any,
) -> Path:
    """The folder of a pipeline, with its model.yaml and without its steps."""
    folder = root / name / "1"
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "name": name,
        "version": "1",
        "format": "pipeline",
        "inputs": tensors(inputs),
        "outputs": tensors(outputs),
        "steps": list(steps),
        **fields,
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(document, sort_keys=False))
    return folder


def write_chain(root: Path, name: str = "chain", **fields: Any) -> Path:
    """A pipeline of two steps that answers 4 x."""
    folder = write_pipeline(root, name, **fields)
    for path in ("first", "second"):
        write_step(folder, path)
    return folder
