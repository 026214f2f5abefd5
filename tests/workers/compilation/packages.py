"""Model packages of format `pytorch` for compilation: each takes `x` float32 (batch, 16) and answers `y` likewise."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent, indent

import yaml

from penstock.registry.package import load_package
from penstock.workers.runtime.open import open_runtime
from penstock.workers.runtime.pytorch import PyTorchRuntime

__all__ = ["loaded", "write_module"]

_MODEL: str = """
import torch


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.linear = torch.nn.Linear(16, 16)

    def forward(self, x):
{forward}


def build():
{before_build}
    return Module()
"""


def write_module(
    root: Path, forward: str = "return self.linear(x).relu()", *, name: str = "module", before_build: str = "pass"
) -> Path:
    """A package whose module has one linear layer and computes `forward`; returns its folder."""
    folder = root / name / "1"
    folder.mkdir(parents=True)
    tensor = {"dtype": "float32", "shape": ["batch", 16]}
    spec = {
        "name": name,
        "version": "1",
        "format": "pytorch",
        "entrypoint": "model:build",
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
        "batching": {"max_batch_size": 16},
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    source = _MODEL.format(forward=indent(dedent(forward), " " * 8), before_build=indent(dedent(before_build), " " * 4))
    (folder / "model.py").write_text(source)
    return folder


def loaded(folder: Path, device: str = "cpu") -> PyTorchRuntime:
    """The package's runtime, with one CPU thread."""
    runtime = open_runtime(load_package(folder))
    assert isinstance(runtime, PyTorchRuntime)
    runtime.load(device, 1)
    return runtime
