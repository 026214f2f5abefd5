"""Versions without a package on disk: a runtime of the test's own, served as a worker would serve it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.registry.package import ModelSpec, Package
from penstock.registry.settings import InferenceConfig
from penstock.workers.runtime.base import Runtime
from penstock.workers.versions.version import ServedVersion

__all__ = ["spec_of", "version_of"]


def spec_of(**document: Any) -> ModelSpec:
    """The spec of a model with one column of floats in and out."""
    tensor = {"dtype": "float32", "shape": ["batch", 1]}
    return ModelSpec.model_validate(
        {
            "name": "double",
            "version": "1",
            "format": "python",
            "entrypoint": "model:build",
            "inputs": [{"name": "x", **tensor}],
            "outputs": [{"name": "y", **tensor, "allow_nan": True}],
            **document,
        }
    )


def version_of(runtime: Runtime, spec: ModelSpec, max_rows: int) -> ServedVersion:
    """The version that this runtime serves, loaded; its batches have at most `max_rows` rows."""
    config = InferenceConfig.model_validate({"batching": {"max_batch_size": max_rows}})
    version = ServedVersion(Package(spec, Path("nowhere") / spec.name / spec.version), config)
    version.runtime = runtime
    version.has_loaded()
    return version
