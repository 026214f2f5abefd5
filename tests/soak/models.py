"""The three models of a soak run, written into a models root: NumPy functions that answer 2 x + offset."""

from __future__ import annotations

from pathlib import Path

import yaml

from tests.packages import write_package
from tests.soak.plan import SHAPES, Shape

__all__ = ["write_models"]


def write_models(root: Path) -> None:
    """One package for each shape of the plan."""
    for name, shape in SHAPES.items():
        package = write_package(root, name, _source(shape), max_batch_size=shape.max_batch_size)
        file = package / "model.yaml"
        spec = yaml.safe_load(file.read_text())
        for tensor in (*spec["inputs"], *spec["outputs"]):
            tensor["shape"] = ["batch", shape.width]
        file.write_text(yaml.safe_dump(spec, sort_keys=False))


def _source(shape: Shape) -> str:
    return f"""
        import time
        import numpy as np

        def build():
            def forward(inputs):
                time.sleep({shape.forward_s!r})
                return {{"y": 2 * inputs["x"] + np.float32({shape.offset})}}

            return forward
        """
