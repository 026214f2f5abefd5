"""TorchScript archives: scripted and traced modules, and files that only look like one."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.registry.errors import ConfigurationError, InvalidInput
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


_MINIMAL = """\
name: text-classifier
version: 3
format: torchscript
signature:
  inputs:
    - name: tokens
      dtype: int64
      shape: [batch, seq]
    - name: mask
      dtype: int64
      shape: [batch, seq]
      optional: true
  outputs:
    - name: logits
      dtype: float32
      shape: [batch, num_classes]
codecs: {default: base64}
"""
"""A package of another server of TorchScript models, as its documents write it."""


class Classifier(torch.nn.Module):
    """The sum of the tokens that the mask leaves, and their number."""

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        kept = torch.ones_like(tokens) if mask is None else mask
        return torch.stack([(tokens * kept).sum(1), kept.sum(1)], 1).float()


def test_package_with_a_signature_and_an_unnamed_model_ts_is_served(models_root: Path):
    """`signature`, a number as version, model.ts and codecs are all that such a package writes (IN-022 to IN-027)."""
    folder = models_root / "text-classifier" / "3"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(_MINIMAL)
    script: Any = torch.jit.script
    script(Classifier()).save(folder / "model.ts")
    runtime = opened(folder)
    assert (runtime.version, runtime.spec.codecs.default) == ("3", "base64")
    tokens = np.array([[1, 2, 3], [4, 5, 6]])
    assert answers(runtime, tokens=tokens)["logits"].tolist() == [[6.0, 3.0], [15.0, 3.0]]
    mask = np.array([[1, 0, 1], [0, 0, 1]])
    assert answers(runtime, tokens=tokens, mask=mask)["logits"].tolist() == [[4.0, 2.0], [6.0, 1.0]]
    with pytest.raises(InvalidInput, match=r"^mask: seq is 2, but 3 in another input"):
        runtime.spec.signature.check({"tokens": tokens, "mask": mask[:, :2]})


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
