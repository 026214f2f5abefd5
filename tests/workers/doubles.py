"""Parts of a worker without a package on disk: a runtime of the test's own, versions, jobs and batches.

job_of -> a claimed job of the model `double`;  ready_version -> a version that doubles;  run_of -> one batch of both
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.registry.broker.base import Broker, Delivery
from penstock.registry.envelope import JobHeader, Keyring, seal
from penstock.registry.package import ModelSpec, Package
from penstock.registry.package.spec_sections import Precision
from penstock.registry.queues import Priority
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array, encode
from penstock.workers.batch_run import BatchRun
from penstock.workers.batching.batcher import Batch
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.runtime.base import Prepared, Runtime, StreamContext, concatenate
from penstock.workers.runtime.forms import Forms, Forward
from penstock.workers.versions.deployment_store import NullDeploymentStore
from penstock.workers.versions.lifecycle import ModelLifecycle
from penstock.workers.versions.loader import Loader
from penstock.workers.versions.repository import EmptyRepository
from penstock.workers.versions.tuner import NullTuner
from penstock.workers.versions.version import ServedVersion

__all__ = [
    "NEVER_MS",
    "Doubler",
    "Formed",
    "PendingLoader",
    "RowRuntime",
    "cold_version",
    "counted",
    "job_of",
    "lifecycle_of",
    "ready_version",
    "run_of",
    "spec_of",
    "version_of",
]

NEVER_MS = 10**15
"""A time of expiry that no test reaches."""
_UNSIGNED = Keyring.parse(None)
_entries = itertools.count(1)


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


def version_of(runtime: Runtime, spec: ModelSpec, max_rows: int, *, most_bytes: int = 1 << 28) -> ServedVersion:
    """The version that this runtime serves, loaded; its batches have at most `max_rows` rows."""
    version = cold_version(spec, max_rows, most_bytes=most_bytes)
    version.runtime = runtime
    version.has_loaded()
    return version


def cold_version(spec: ModelSpec, max_rows: int, *, most_bytes: int = 1 << 28) -> ServedVersion:
    """A version that is not loaded, and has no files from which it could be."""
    config = InferenceConfig.model_validate({"batching": {"max_batch_size": max_rows, "max_queue_bytes": most_bytes}})
    return ServedVersion(Package(spec, Path("nowhere") / spec.name / spec.version), config)


class RowRuntime:
    """A runtime without files over the rows of `x`. A subclass has the spec and runs the rows."""

    version = "1"
    content_hash = "d" * 64
    memory_bytes = 0
    may_change_threads = False

    def load(self, device: str, threads: int) -> None:
        """There is nothing to load."""

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Nothing is too long."""

    def length(self, inputs: Mapping[str, Array]) -> int:
        return 1

    def prepare(self, jobs: Sequence[Mapping[str, Array]]) -> Prepared:
        rows = concatenate(jobs)["x"]
        return Prepared(len(rows), rows)

    def run(self, prepared: Prepared) -> dict[str, Array]:
        raise NotImplementedError

    def stream(
        self, inputs: Mapping[str, Array], context: StreamContext
    ) -> Generator[dict[str, Array], None, dict[str, Array]]:
        yield from ()
        return self.run(self.prepare([inputs]))

    def close(self) -> None:
        """There is nothing to release."""


class Doubler(RowRuntime):
    """A runtime that answers 2 x."""

    @property
    def spec(self) -> ModelSpec:
        return spec_of()

    def run(self, prepared: Prepared) -> dict[str, Array]:
        return {"y": prepared.payload * 2}


class Formed:
    """A runtime that has another form, which fails for whatever it is given."""

    precision: Precision = "auto"

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.forms = Forms(runtime.run)
        self.forms.use("compiled", self._fail)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def candidates(self, compiler: object) -> dict[str, Callable[[], Forward]]:
        return {}

    def run(self, prepared: Prepared) -> dict[str, Array]:
        return self.forms.run(prepared)

    @staticmethod
    def _fail(prepared: Prepared) -> dict[str, Array]:
        raise RuntimeError("the other form was used")


def ready_version(max_rows: int = 16, *, most_bytes: int = 1 << 28, **document: Any) -> ServedVersion:
    """A loaded version that doubles; `document` changes its spec. most_bytes: what its worker holds at most."""
    return version_of(Doubler(), spec_of(**document), max_rows, most_bytes=most_bytes)


def job_of(
    *numbers: float,
    model: str = "double",
    priority: Priority = Priority.NORMAL,
    crashes: int = 0,
    active: bytes = b"",
    claimed: float = 0.0,
    queue_ms: float = 0.0,
    expires_ms: int = NEVER_MS,
    tenant: str = "acme",
    **header: Any,
) -> ClaimedJob:
    """A claimed job with a row for each number, with an entry of its own; `header` fills in the envelope."""
    entry = next(_entries)
    inputs = {"x": np.array([[number] for number in numbers or (1.0,)], np.float32)}
    content, body = encode(inputs)
    job_header = JobHeader(f"{model}.{entry}", tenant, model, priority.label, content, **header)
    sealed = seal("job", job_header, body, _UNSIGNED)
    delivery = Delivery(model, priority, f"{entry}-0".encode(), sealed, crashes=crashes, active=active)
    return ClaimedJob(delivery, job_header, body, len(inputs["x"]), claimed, queue_ms, expires_ms)


def run_of(version: ServedVersion, *jobs: ClaimedJob, is_as_built: bool = False) -> BatchRun:
    """The batch of these jobs as the scheduler hands it over: they take room, and the batch is in flight."""
    for job in jobs:
        version.queue.reserve(job)
    version.queue.in_flight += 1
    items = version.pending(jobs)
    rows = sum(item.rows for item in items)
    batch = Batch(items[0].key, items, rows, rows, "full", items[0].priority)
    return BatchRun(version, batch, is_as_built=is_as_built)


class PendingLoader(Loader):
    """Begins loads that do not end."""

    def begin(self, version: ServedVersion, runtime: Runtime) -> None:
        """There is nothing to load."""


def lifecycle_of(
    config: InferenceConfig,
    specs: Sequence[ModelSpec],
    broker: Broker,
    metrics: InferenceMetrics,
    clock: Callable[[], float],
) -> ModelLifecycle:
    """The lifecycle of models with these specs: nothing is loaded, and loads do not end."""
    return ModelLifecycle(
        config,
        [cold_version(spec, 1).package for spec in specs],
        broker,
        PendingLoader("cpu", 1, clock=clock),
        repository=EmptyRepository(),
        tuner=NullTuner(),
        metrics=metrics,
        verify=None,
        on_version_change=lambda _model, _old, _new: None,
        ring=lambda: None,
        accepts_new_models=False,
        deployments=NullDeploymentStore(),
    )


def counted(metrics: InferenceMetrics, counter: str, *labels: str) -> float:
    """The sum of a counter over its labels; `labels`: only where the model's version and endpoint are these."""
    (family,) = [family for family in metrics.collect() if family.name == counter]
    return sum(
        sample.value
        for sample in family.samples
        if not labels or (sample.labels["model_version"], sample.labels["endpoint"]) == labels
    )
