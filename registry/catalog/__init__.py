"""The model registry: versions, stages, lineage and history in a database, every change signed."""

from __future__ import annotations

from penstock.registry.catalog.client import (
    HISTORY,
    LATEST,
    Change,
    ModelLineage,
    ModelRegistryClient,
    ModelStage,
    RegisteredVersion,
    Registrable,
    Transition,
    VersionCallback,
    Veto,
)

__all__ = [
    "Change",
    "HISTORY",
    "LATEST",
    "ModelLineage",
    "ModelRegistryClient",
    "ModelStage",
    "RegisteredVersion",
    "Registrable",
    "Transition",
    "VersionCallback",
    "Veto",
]
