"""The model that most figures use: `models/mlp/1`, its inputs from a seed, and what it answers in process."""

from __future__ import annotations

import runpy
import time
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from tests.servers import ROOT

if TYPE_CHECKING:
    import torch

__all__ = ["BATCH", "CLASSES", "MODELS", "WIDTH", "Float32Array", "check", "in_process_rate", "inputs", "module"]

Float32Array = npt.NDArray[np.float32]
MODELS: Final = ROOT / "models"
WIDTH: Final = 384
CLASSES: Final = 10
BATCH: Final = 64
_TOLERANCE: Final = 1e-5


def inputs(jobs: int, seed: int) -> Float32Array:
    """One row per job, (jobs, 384) float32; other seeds give other rows."""
    return np.random.default_rng(seed).standard_normal((jobs, WIDTH), dtype=np.float32)


def module() -> torch.nn.Module:
    """The package's module, on one thread."""
    import torch

    torch.set_num_threads(1)
    build = runpy.run_path(str(MODELS / "mlp" / "1" / "model.py"))["build"]
    model: torch.nn.Module = build().eval()
    return model


def check(rows: Float32Array, logits: Float32Array) -> None:
    """Raises ValueError unless `logits` are what the model answers to `rows`."""
    import torch

    with torch.inference_mode():
        expected = module()(torch.from_numpy(rows)).numpy()
    if logits.shape != expected.shape or not np.allclose(logits, expected, atol=_TOLERANCE):
        raise ValueError(f"Wrong answers: logits of shape {logits.shape} differ from what the model says in process")


def in_process_rate(rows: Float32Array) -> float:
    """Jobs per second of the model alone: rows joined to full batches, one forward each, one thread."""
    import torch

    model, count = module(), len(rows) // BATCH * BATCH
    jobs = [rows[index : index + 1] for index in range(count)]
    begun = time.perf_counter()
    with torch.inference_mode():
        for start in range(0, count, BATCH):
            model(torch.from_numpy(np.concatenate(jobs[start : start + BATCH]))).numpy()
    return count / (time.perf_counter() - begun)
