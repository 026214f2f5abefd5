"""Documents of model.yaml for the tests of packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

__all__ = ["ENCODER", "PLAIN", "SCRIPTED", "SEQUENCES", "changed", "nested", "write"]

PLAIN: dict[str, Any] = {
    "name": "plain",
    "version": "1",
    "format": "python",
    "entrypoint": "model:build",
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}],
}
ENCODER: dict[str, Any] = {
    "name": "plain",
    "version": "1",
    "format": "transformers",
    "source": {"path": "weights"},
    "inputs": [{"name": "text", "dtype": "string", "shape": ["batch"]}],
    "outputs": [{"name": "embedding", "dtype": "float32", "shape": ["batch", 8]}],
}


SCRIPTED: dict[str, Any] = {key: value for key, value in PLAIN.items() if key != "entrypoint"} | {
    "format": "torchscript",
    "weights": "model.pt",
}
SEQUENCES: dict[str, Any] = PLAIN | {"inputs": [{"name": "x", "dtype": "int64", "shape": ["batch", "sequence"]}]}


def write(root: Path, document: object, folder: str = "plain/1") -> Path:
    """A package folder with this model.yaml and an empty module."""
    path = root / folder
    path.mkdir(parents=True, exist_ok=True)
    (path / "model.yaml").write_text(document if isinstance(document, str) else yaml.safe_dump(document))
    (path / "model.py").write_text("def build(): ...\n")
    return path


def changed(base: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The fields of a model.yaml with some replaced; None removes a field."""
    return {key: value for key, value in (base | fields).items() if value is not None}


def nested(base: dict[str, Any]) -> dict[str, Any]:
    """The same model.yaml with its inputs and outputs in the section `signature`."""
    tensors = {name: base[name] for name in ("inputs", "outputs")}
    return {key: value for key, value in base.items() if key not in tensors} | {"signature": tensors}
