"""Model objects of any framework at the serving boundary: their framework, and one proxy to call them.

model object -> detect_framework -> adapt -> InferenceProxy: called like the model, counted and observed
"""

from __future__ import annotations

from penstock.workers.frameworks.adapters import Adapter, OnnxAdapter, PyTorchAdapter, TransformersAdapter, adapt
from penstock.workers.frameworks.detector import FRAMEWORKS, detect_framework
from penstock.workers.frameworks.inference_proxy import InferenceProxy

__all__ = [
    "Adapter",
    "FRAMEWORKS",
    "InferenceProxy",
    "OnnxAdapter",
    "PyTorchAdapter",
    "TransformersAdapter",
    "adapt",
    "detect_framework",
]
