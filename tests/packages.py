"""Model packages for tests, written into a models root: NumPy only, so that a worker is ready within a second.

Each takes `x` float32 (batch, 4) and answers `y` of the same shape.
"""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import yaml


def write_package(root: Path, name: str, source: str, *, version: str = "1", max_batch_size: int = 16) -> Path:
    """A `python` package whose `model.py` is `source` and defines `build`; returns its folder."""
    folder = root / name / version
    folder.mkdir(parents=True)
    spec = {
        "name": name,
        "version": version,
        "format": "python",
        "entrypoint": "model:build",
        "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
        "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}],
        "batching": {"max_batch_size": max_batch_size},
    }
    (folder / "model.yaml").write_text(yaml.safe_dump(spec, sort_keys=False))
    (folder / "model.py").write_text(dedent(source))
    return folder


def write_double(root: Path, name: str = "double") -> Path:
    """Answers 2 x."""
    return write_package(
        root,
        name,
        """
        def build():
            return lambda inputs: {"y": inputs["x"] * 2}
        """,
    )


def write_sleeper(root: Path, name: str = "sleeper", *, forward_s: float, max_batch_size: int = 16) -> Path:
    """Answers 2 x after `forward_s` seconds a batch, and holds no GIL meanwhile."""
    return write_package(
        root,
        name,
        f"""
        import time

        def build():
            def forward(inputs):
                time.sleep({forward_s!r})
                return {{"y": inputs["x"] * 2}}

            return forward
        """,
        max_batch_size=max_batch_size,
    )


def write_raiser(root: Path, name: str = "raiser") -> Path:
    """Answers 2 x, and raises ValueError for a batch in which any row begins with a negative number."""
    return write_package(
        root,
        name,
        """
        def build():
            def forward(inputs):
                if (inputs["x"][:, 0] < 0).any():
                    raise ValueError("a negative row")
                return {"y": inputs["x"] * 2}

            return forward
        """,
    )


def write_recorder(root: Path, forward_log: Path, name: str = "recorder", *, forward_s: float = 0.0) -> Path:
    """Answers 2 x, and notes the first number of every row of every forward in `forward_log` before it answers."""
    return write_package(
        root,
        name,
        f"""
        import json
        import os
        import time

        def build():
            # One write to a file opened for appending is one line, whichever process writes.
            forward_log = os.open({str(forward_log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

            def forward(inputs):
                rows = inputs["x"][:, 0].tolist()
                os.write(forward_log, (json.dumps({{"pid": os.getpid(), "rows": rows}}) + "\\n").encode())
                time.sleep({forward_s!r})
                return {{"y": inputs["x"] * 2}}

            return forward
        """,
    )


def recorded_forwards(forward_log: Path) -> list[list[float]]:
    """The rows of every forward that a recorder began, oldest first; warm-up included."""
    if not forward_log.exists():
        return []
    return [json.loads(line)["rows"] for line in forward_log.read_text().splitlines()]
