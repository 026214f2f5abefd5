"""TorchScript archives: scripted and traced modules, and files that only look like one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.registry.errors import ConfigurationError
from tests.workers.runtime.formats import BIAS, answers, opened, write, write_torchscript


class Trained(torch.nn.Module):
    """A module whose answer shows whether it was left in training mode."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x + 1 if self.training else x}


def test_archive_saved_in_training_mode_is_set_to_evaluation(models_root: Path):
    """`eval()` reaches the script (IN-028)."""
    runtime = opened(write_torchscript(models_root, Trained().train()))
    assert answers(runtime, x=np.ones((1, 4), np.float32))["y"].tolist() == [[1.0] * 4]


def test_traced_module_is_served_like_a_scripted_one(models_root: Path):
    """Both ways of saving a module give an archive."""
    module = torch.nn.Linear(4, 4).eval()
    folder = write(models_root, "affine", {"format": "torchscript", "weights": "model.ts"})
    trace: Any = torch.jit.trace
    trace(module, torch.ones(2, 4)).save(folder / "model.ts")
    x = np.random.default_rng(1).standard_normal((3, 4), np.float32)
    with torch.inference_mode():
        np.testing.assert_allclose(
            answers(opened(folder), x=x)["y"], module(torch.from_numpy(x)).numpy(), rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize(("precision", "delta"), [("fp16", 1e-2), ("bf16", 1e-1)])
def test_script_computes_in_the_precision_asked_for(models_root: Path, precision: str, delta: float):
    """The archive's weights are cast like a module's, and its answers back (CX-020)."""
    folder = write_torchscript(models_root, precision=precision)
    y = answers(opened(folder), x=np.zeros((1, 4), np.float32))["y"]
    assert y.dtype == np.float32
    assert 0 < np.abs(y - BIAS).max() <= delta


class Hostile:
    """Runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("container", ["checkpoint", "pickle"])
def test_pickle_under_the_name_of_an_archive_is_refused_and_not_run(models_root: Path, container: str, tmp_path: Path):
    """What `torch.save` or pickle wrote is no archive, and nothing in it is executed."""
    folder = write_torchscript(models_root)
    marker = tmp_path / "executed"
    if container == "checkpoint":
        torch.save(Hostile(marker), folder / "model.pt")
    else:
        (folder / "model.pt").write_bytes(pickle.dumps(Hostile(marker)))
    with pytest.raises(ConfigurationError, match=r"^affine/1: .*model\.pt"):
        opened(folder)
    assert not marker.exists()


def test_text_cannot_be_an_input(models_root: Path):
    """Tensors are numbers; a package that declares text for them is refused."""
    text = [{"name": "x", "dtype": "string", "shape": ["batch"]}]
    with pytest.raises(
        ConfigurationError, match=r"^affine/1: found a string tensor, expected numbers for torchscript$"
    ):
        opened(write_torchscript(models_root, inputs=text))
