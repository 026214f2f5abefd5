"""Inputs and outputs of a job as JSON, in the format that the model's package chooses (codecs.default).

--inputs {"x": [[1, 2]]} or {"x": {"dtype", "shape", "base64"}} -> read -> Client.submit
job.result -> written by codecs.default of the model -> --json
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from penstock.registry import codecs
from penstock.registry.admission import SpecCache
from penstock.registry.broker.base import FleetEnd
from penstock.registry.package.generation import SAMPLING
from penstock.registry.tensors import Array

__all__ = ["codec_of", "read", "written"]


def read(inputs: Mapping[str, object]) -> dict[str, object]:
    """Nested lists unchanged; objects with dtype, shape and base64 as arrays. Raises InvalidInput.

    An object of sampling fields is unchanged, too: the client makes JSON of it.
    """
    return {
        name: codecs.read_array(name, value) if _is_tensor(name, value) else value for name, value in inputs.items()
    }


def _is_tensor(name: str, value: object) -> bool:
    return isinstance(value, Mapping) and (name != SAMPLING or "dtype" in value)


def codec_of(broker: FleetEnd, models_root: Path, model: str, version: str) -> codecs.Codec:
    """The format of outputs that the package declares; an empty version is the active one."""
    return SpecCache(models_root).store(model, broker.spec(model, version), version).codecs.default


def written(outputs: Mapping[str, Array], codec: codecs.Codec) -> dict[str, Any]:
    """`json`: nested lists; an output with NaN or infinity, which JSON lacks, is written with base64.

    `base64`: dtype, shape and little-endian bytes. Raises InvalidInput for an array without such bytes.
    """
    return {
        name: values.tolist() if codec == "json" and _is_json(values) else codecs.written(values, "base64")
        for name, values in outputs.items()
    }


def _is_json(values: Array) -> bool:
    return values.dtype.kind != "f" or bool(np.isfinite(values).all())
