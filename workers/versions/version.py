"""The models that a worker serves, each in one or more versions side by side.

    ServedModel     its versions by label, and which of them is active
    ServedVersion   cold -> loading -> ready, or failed; its runtime, its policy, its queue

A version that is not loaded may have pending jobs: they wait for it. Batches never mix versions, because each version
has a batcher of its own.
"""

from __future__ import annotations

from enum import Enum
from typing import Final, NamedTuple

from penstock.registry.deployment import Deployment
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec, Package
from penstock.registry.package.signature import Signature
from penstock.registry.settings import InferenceConfig
from penstock.registry.tensors import Tensor
from penstock.workers.batching.batcher import Batch, BatchKey, Pending
from penstock.workers.job import ClaimedJob
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.forms import Forms, Tunable
from penstock.workers.runtime.open import open_runtime
from penstock.workers.versions.policy import ENDPOINT, VersionPolicy
from penstock.workers.versions.queue import VersionQueue
from penstock.workers.versions.tuner import Observer

__all__ = ["LoadedModel", "ServedModel", "ServedVersion", "VersionState", "is_name_of"]

_NO_END: Final = 1 << 20
_SHORTEST_PREFIX: Final = 6
"""Hex digits of a content hash that may stand for a version."""


def is_name_of(name: str, label: str, content_hash: str) -> bool:
    """Whether a job that names `name` means the version of this label and content."""
    return name == label or (len(name) >= _SHORTEST_PREFIX and content_hash.startswith(name))


class VersionState(Enum):
    """The state of a version between disk and memory."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


_CLAIMABLE: Final = (VersionState.READY, VersionState.COLD)


class LoadedModel(NamedTuple):
    """The parts of a version that a forward needs; they stay valid for a run if the version is unloaded meanwhile."""

    runtime: Runtime
    content_hash: str
    """SHA-256 of the loaded files; empty: nothing is loaded."""
    forms: Forms | None
    """The forms of a model that has other forms than the one that its author built."""


class ServedVersion:
    """One version of a model in this worker. The I/O thread owns it, except the runtime's loads and forwards."""

    def __init__(self, package: Package, config: InferenceConfig) -> None:
        self.package: Final = package
        self.spec: Final[ModelSpec] = package.spec
        self.name: Final = package.spec.name
        self.label: Final = package.spec.version
        self.signature: Final[Signature] = package.spec.signature
        self.policy: Final = VersionPolicy.of(package.spec, config)
        self.queue: Final = VersionQueue(self.name, self.policy)
        self._config = config
        self.pinned_hash = ""
        """The content that was promoted under this label; empty: any content on disk may be loaded."""
        self.runtime: Runtime = self._open()
        self.model = LoadedModel(self.runtime, "", None)
        self.observer: Observer | None = None
        """Observes every committed batch while the version is loaded."""
        self.state = VersionState.COLD
        self.problem = ""
        """Why the version could not be loaded."""
        self.last_problem = ""
        """The problem of the last load that failed, also while it is tried again."""
        self.last_hash = ""
        """The content hash of the last load."""
        self.is_wanted = False
        """Whether an operator asked for the version to be loaded."""
        self.used_at = 0.0
        """Monotonic seconds of the last batch, or of the last job that a cached answer ended."""
        self.calibrated_rows = 0
        """Rows that the device's memory allows, as measured; 0: not measured."""
        self._last_fit: tuple[tuple[Tensor, ...] | None, int] = (None, 0)

    @property
    def content_hash(self) -> str:
        """SHA-256 of the loaded files; empty: nothing is loaded."""
        return self.model.content_hash

    @property
    def generation(self) -> int:
        """The generation of the form that answers the next batch; see Forms.generation."""
        forms = self.model.forms
        return forms.generation if forms is not None else 0

    def has_loaded(self, now: float = 0.0) -> None:
        """The runtime is ready for forwards since `now`, in monotonic seconds."""
        runtime = self.runtime
        self.state, self.problem, self.last_problem = VersionState.READY, "", ""
        self.used_at = now
        self.last_hash = runtime.content_hash
        self.model = LoadedModel(runtime, self.last_hash, runtime.forms if isinstance(runtime, Tunable) else None)

    def has_failed(self, problem: str) -> None:
        """The runtime could not be loaded. A new runtime takes its place for the next try."""
        self.state, self.problem, self.last_problem = VersionState.FAILED, problem, problem
        self._renew()

    def unload(self) -> None:
        """Close the runtime. The next load begins afresh."""
        self.observer = None
        self.runtime.close()
        self.state = VersionState.COLD
        self._renew()

    def pin_content(self, content_hash: str) -> None:
        """Load this content, and no other, under the version's label. Empty: any content."""
        self.pinned_hash = content_hash
        if self.state in (VersionState.COLD, VersionState.FAILED):
            self.state = VersionState.COLD
            self._renew()

    def _renew(self) -> None:
        self.runtime = self._open()
        self.model = LoadedModel(self.runtime, "", None)

    def _open(self) -> Runtime:
        return open_runtime(
            self.package,
            self.pinned_hash,
            frameworks=self._config.frameworks,
            precision=self.policy.precision,
            warmup_requests=self._config.compilation.warmup_requests,
        )

    @property
    def is_ready(self) -> bool:
        """Whether its forwards may begin."""
        return self.state is VersionState.READY

    @property
    def is_idle(self) -> bool:
        """Whether no job waits for it or runs on it."""
        return self.queue.is_idle

    @property
    def may_start(self) -> int:
        """Forwards that the version's concurrency still allows."""
        return self.policy.concurrency - self.queue.in_flight if self.is_ready else 0

    @property
    def is_approved(self) -> bool:
        """Whether operators promoted, registered or requested the version, with this content if they named one."""
        return bool(self.pinned_hash) or self.is_wanted

    @property
    def room(self) -> int:
        """How many more jobs may wait for it. While it is not loaded: no more than its capacity."""
        return _NO_END if self.is_ready else self.queue.free

    def is_named(self, name: str) -> bool:
        """Whether `name` is its label or, once it is loaded, the beginning of its content hash."""
        return is_name_of(name, self.label, self.content_hash)

    def fit(self, job: ClaimedJob) -> None:
        """Check a job against the signature that is served, and count its rows. Raises InvalidInput.

        If the signature holds only shapes, a job with the same description as the one before needs no second check:
        the client has checked its values, and a NaN harms no other job.
        """
        content, rows = self._last_fit
        if job.header.content == content:
            job.rows = rows
        else:
            job.inputs = self.signature.check(job.inputs)
            job.rows = self.signature.rows(job.inputs)
            if self.signature.is_of_shapes:
                self._last_fit = (job.header.content, job.rows)
        if job.header.options.outputs:
            self.signature.select_outputs(job.header.options.outputs)
        if self.policy.tokenises and self.is_ready:
            self.runtime.check(job.inputs)

    def misfits(self) -> list[tuple[ClaimedJob, InvalidInput]]:
        """Remove the pending jobs that are too long; only the loaded model can find them."""
        found: list[tuple[ClaimedJob, InvalidInput]] = []

        def is_too_long(item: Pending[ClaimedJob]) -> bool:
            try:
                self.runtime.check(item.job.inputs)
            except InvalidInput as error:
                found.append((item.job, error))
                return True
            return False

        if self.policy.tokenises:
            self.queue.batcher.discard(is_too_long)
        return found

    def pending(self, job: ClaimedJob) -> Pending[ClaimedJob]:
        """The job as the batcher sees it."""
        inputs = job.inputs
        shape = self.signature.batch_key(inputs)
        nbytes = sum(values.nbytes for values in inputs.values()) if self.queue.limits.max_bytes else 0
        return Pending(
            BatchKey(self.name, self.label, ENDPOINT, shape),
            int(job.delivery.priority),
            job.rows,
            self.runtime.length(inputs),
            nbytes,
            job.claimed,
            job,
        )

    def alone(self, job: ClaimedJob) -> Batch[ClaimedJob]:
        """A batch of this one job."""
        item = self.pending(job)
        return Batch(item.key, [item], item.rows, item.rows * item.length, "idle", item.priority)


class ServedModel:
    """One model in this worker: its versions, and which of them is active.

    `active` is None while the active version cannot be loaded here: then the worker claims no jobs of the model.
    """

    def __init__(self, name: str, active: ServedVersion | None) -> None:
        self.name: Final = name
        self.versions: Final[dict[str, ServedVersion]] = {}
        """By label."""
        self.active = active
        if active is not None:
            self.versions[active.label] = active
        self.record = b""
        """The record of the active version, as the last delivery carried it."""
        self.deployment: Deployment | None = None
        """The decision in that record. None before the first promotion: the highest version on disk that loads is
        active."""
        self.decided = b""
        """The record of that decision, verified."""

    @property
    def content_hash(self) -> str:
        """The content hash of the active version; empty if it is unknown."""
        if self.deployment is not None:
            return self.deployment.content_hash
        return self.active.last_hash if self.active is not None else ""

    @property
    def label(self) -> str:
        """The label of the active version; empty while it cannot be loaded here."""
        return self.active.label if self.active is not None else ""

    @property
    def is_claimable(self) -> bool:
        """Whether this worker claims jobs of the model. While the active version is loading, others claim them."""
        active = self.active
        return active is not None and active.state in _CLAIMABLE

    @property
    def free(self) -> int:
        """Jobs that may be claimed now."""
        active = self.active
        return active.queue.free if active is not None and active.state in _CLAIMABLE else 0

    def named(self, name: str) -> ServedVersion | None:
        """The version of this label or beginning of a content hash, if it is known here."""
        return self.versions.get(name) or next((each for each in self.versions.values() if each.is_named(name)), None)
