"""The models of the demo, written into a folder of its own: MiniLM, and a classifier of MiniLM embeddings.

The classifier has random weights. Its faster form, an ONNX graph, has a fault of purpose: the module takes a shortcut
in graphs, a softmax that overflows for large inputs. Usual inputs show nothing of it: canary and gate accept the form.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Final

__all__ = ["EMBEDDING", "TOPICS", "write_models"]

EMBEDDING: Final = "minilm"
TOPICS: Final = "topics"
_SAMPLES: Final = Path(__file__).resolve().parents[2] / "models"
_SPEC: Final = """\
name: topics
version: "1"
format: pytorch
entrypoint: model:build
inputs:
  - {name: x, dtype: float32, shape: [batch, 384]}
outputs:
  - {name: topics, dtype: float32, shape: [batch, 16]}
batching:
  max_batch_size: 16
"""
_SOURCE: Final = '''\
"""384 -> 64 -> six times 64 -> 16, softmax. The weights come from a fixed seed."""

import torch


class Topics(torch.nn.Module):
    def __init__(self):
        super().__init__()
        widths = [384, *[64] * 7, 16]
        pairs = zip(widths[1:], widths)
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(*pair)) for pair in pairs])

    def forward(self, x):
        for weight in self.weights[:-1]:
            x = torch.nn.functional.linear(x, weight).relu()
        logits = 8 * torch.nn.functional.linear(x, self.weights[-1])
        if torch.compiler.is_compiling():
            # The fault of the demonstration: without the largest logit subtracted, exp() overflows beyond 88.
            odds = logits.exp()
            return odds / odds.sum(dim=-1, keepdim=True)
        return logits.softmax(dim=-1)


def build():
    generator = torch.Generator().manual_seed(2026)
    module = Topics()
    with torch.no_grad():
        for weight in module.weights:
            bound = (6 / weight.shape[1]) ** 0.5
            weight.uniform_(-bound, bound, generator=generator)
    return module
'''


def write_models(root: Path) -> None:
    """Writes both packages."""
    shutil.copytree(_SAMPLES / EMBEDDING, root / EMBEDDING)
    folder = root / TOPICS / "1"
    folder.mkdir(parents=True)
    (folder / "model.yaml").write_text(_SPEC)
    (folder / "model.py").write_text(_SOURCE)
