"""Inputs and outputs of a job as the command reads and writes them: JSON, by the codec that the model's package names.

--inputs {"x": [[1, 2]]} or {"x": {"dtype", "shape", "base64"}} -> read -> Client.submit
job.result -> written by codecs.default of the model -> --json
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.registry import codecs
from penstock.registry.admission import SpecCache
from penstock.registry.broker.base import FleetEnd
from penstock.registry.tensors import Array

__all__ = ["codec_of", "read", "written"]


def read(inputs: Mapping[str, object]) -> dict[str, object]:
    """Nested lists as they are, and tensors that say dtype and shape as arrays. Raises InvalidInput."""
    return {
        name: codecs.read_array(name, value) if isinstance(value, Mapping) else value for name, value in inputs.items()
    }


def codec_of(broker: FleetEnd, models_root: Path, model: str, version: str) -> codecs.Codec:
    """How the package says that its outputs are to be written; an empty version is the one that answers."""
    return SpecCache(models_root).store(model, broker.spec(model, version), version).codecs.default


def written(outputs: Mapping[str, Array], codec: codecs.Codec) -> dict[str, Any]:
    """Nested lists as `json`; dtype, shape and little-endian bytes as `base64`. Raises InvalidInput for the latter."""
    if codec == "json":
        return {name: values.tolist() for name, values in outputs.items()}
    return {name: codecs.written(values, codec) for name, values in outputs.items()}
