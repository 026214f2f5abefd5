"""The seam to the optimizer: what a tuner is told of loaded versions, and a worker without one."""

from __future__ import annotations

from collections.abc import Hashable
from pathlib import Path
from typing import Any

from penstock.registry.broker.memory import MemoryBroker
from penstock.registry.package import load_package
from penstock.registry.settings_sections import InferenceConfig
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Runtime
from penstock.workers.versions.deployment_store import NullDeploymentStore
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.loader import Loader
from penstock.workers.versions.repository import EmptyRepository
from penstock.workers.versions.tuner import BatchObservation, NullTuner, Observer, Tuner
from penstock.workers.versions.version import ServedVersion
from tests.packages import write_package

SOURCE = """
def build():
    return lambda inputs: {"y": inputs["x"]}
"""


class BatchList:
    """An observer that keeps the batches."""

    row_limit = 0

    def __init__(self) -> None:
        self.batches: list[BatchObservation] = []

    def observe(self, batch: BatchObservation) -> None:
        self.batches.append(batch)


class NotedCalls:
    """A tuner that notes its calls; it observes every version."""

    def __init__(self) -> None:
        self.attached: list[tuple[Hashable, str, int]] = []
        self.detached: list[tuple[Hashable, str]] = []
        self.observers: list[BatchList] = []

    def attach(self, key: Hashable, runtime: Runtime, content_hash: str, max_rows: int) -> Observer | None:
        assert runtime.content_hash == content_hash
        self.attached.append((key, content_hash, max_rows))
        self.observers.append(BatchList())
        return self.observers[-1]

    def detach(self, key: Hashable) -> None:
        assert isinstance(key, ServedVersion)
        self.detached.append((key, key.content_hash))

    def report(self) -> dict[str, list[dict[str, Any]]]:
        return {}


def lifecycle_of(root: Path, tuner: Tuner, source: str = SOURCE) -> ModelLifecycle:
    """A worker's lifecycle with one version of a model, not loaded; its batches have at most 8 rows."""
    folder = write_package(root, "scale", source, max_batch_size=8)
    return ModelLifecycle(
        InferenceConfig(),
        [load_package(folder, (root,))],
        MemoryBroker(),
        Loader("cpu", 1),
        repository=EmptyRepository(),
        tuner=tuner,
        metrics=InferenceMetrics((0.1, 1.0)),
        verify=None,
        on_version_change=lambda *_: None,
        ring=lambda: None,
        accepts_new_models=False,
        deployments=NullDeploymentStore(),
    )


def test_a_loaded_version_is_attached_with_its_content_and_batch_size(models_root: Path):
    """The key is the same at each call, and the observer belongs to the version from its load on."""
    tuner = NotedCalls()
    lifecycle = lifecycle_of(models_root, tuner)
    (version,) = lifecycle.turns
    assert tuner.attached == []
    lifecycle.open()
    assert tuner.attached == [(version, version.content_hash, 8)]
    assert version.observer is tuner.observers[0]


def test_a_version_is_detached_before_it_is_unloaded(models_root: Path):
    """At the call its model is still in memory; afterwards no batch is observed."""
    tuner = NotedCalls()
    lifecycle = lifecycle_of(models_root, tuner)
    lifecycle.open()
    (version,) = lifecycle.turns
    content_hash = version.content_hash
    lifecycle.close()
    assert tuner.detached == [(version, content_hash)]
    assert len(content_hash) == 64
    assert (version.content_hash, version.observer) == ("", None)


def test_without_a_tuner_nothing_is_observed(models_root: Path):
    """NullTuner returns no observer and reports no model; to detach a version has no effect."""
    tuner = NullTuner()
    lifecycle = lifecycle_of(models_root, tuner)
    lifecycle.open()
    (version,) = lifecycle.turns
    assert version.is_ready
    assert (version.observer, tuner.report()) == (None, {})
    lifecycle.close()
    assert not version.is_ready


def test_a_version_follows_the_row_limit_of_its_observer(models_root: Path):
    """A refusal of batching has an effect from the next batch on. Without a limit the policy's size stays."""
    tuner = NotedCalls()
    lifecycle = lifecycle_of(models_root, tuner)
    lifecycle.open()
    (version,) = lifecycle.turns
    batch = BatchObservation(8, 0, 0.1, lambda _: [])
    version.observe(batch)
    assert version.queue.limits.max_rows == 8
    tuner.observers[0].row_limit = 1
    version.observe(batch)
    assert (version.queue.limits.max_rows, version.queue.capacity) == (1, 2)
    assert tuner.observers[0].batches == [batch, batch]


def test_a_limit_that_an_earlier_process_found_holds_from_the_load_on(models_root: Path):
    """No batch is formed before the first forward."""

    class Limited(NotedCalls):
        def attach(self, key: Hashable, runtime: Runtime, content_hash: str, max_rows: int) -> Observer | None:
            super().attach(key, runtime, content_hash, max_rows)
            self.observers[-1].row_limit = 1
            return self.observers[-1]

    lifecycle = lifecycle_of(models_root, Limited())
    lifecycle.open()
    (version,) = lifecycle.turns
    assert version.queue.limits.max_rows == 1
