"""The models that a worker serves, each in one or more versions side by side.

    ServedModel     its versions by label, and which of them is active
    ServedArms      while an experiment runs: the versions that share the jobs that name none
    ServedVersion   cold -> loading -> ready, or failed; its runtime, its policy, its queue

A version has a ServedVersion for each endpoint that has had jobs: it has a policy and a queue of its own. It uses the
loaded model of the endpoint `infer`, unless its policy loads another one; see VersionPolicy.load_key.

A version that is not loaded may have pending jobs: they wait for it. Batches never mix versions, because each version
has a batcher of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from functools import cached_property, partial
from typing import Final, NamedTuple

from penstock.registry.deployment import Deployment, Routing
from penstock.registry.envelope import JobHeader
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec, Package
from penstock.registry.package.policy_overlay import Overlay
from penstock.registry.package.signature import Signature
from penstock.registry.queues import DEFAULT_ENDPOINT
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import Array, Tensor
from penstock.safety.orchestrator import SafetyOrchestrator
from penstock.safety.routing import Arm, RoutingTable
from penstock.workers.batching.batcher import Batch, BatchKey, Pending
from penstock.workers.generation.served import GenerateRuntime
from penstock.workers.job import ClaimedJob
from penstock.workers.observe.metrics import GenerationFigures
from penstock.workers.runtime.base import Counted, Runtime
from penstock.workers.runtime.forms import Forms, forms_of
from penstock.workers.runtime.open import open_runtime
from penstock.workers.versions.policy import VersionPolicy
from penstock.workers.versions.queue import VersionQueue
from penstock.workers.versions.tuner import BatchObservation, Observer

__all__ = [
    "LoadedModel",
    "ServedArms",
    "ServedModel",
    "ServedVersion",
    "VersionState",
    "is_name_of",
    "routing_table",
]

_NO_END: Final = 1 << 20
_MOST_FITS: Final = 256
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


class _Fit(NamedTuple):
    """What the description of inputs that fit a signature of shapes says about their jobs."""

    rows: int
    key: BatchKey
    """The same object for equal keys."""
    length: int
    """See Pending.length."""


class ServedVersion:
    """One version of a model in this worker. The I/O thread owns it, except the runtime's loads and forwards."""

    def __init__(
        self,
        package: Package,
        config: InferenceConfig,
        overlay: Overlay | None = None,
        *,
        endpoint: str = DEFAULT_ENDPOINT,
        base: ServedVersion | None = None,
        gate: SafetyOrchestrator | None = None,
    ) -> None:
        """overlay: the knobs that operators have set, by endpoint. base: this version at `infer`; None: itself.

        gate: of what makes an engine for text faster; see GenerateRuntime.
        """
        self.package: Final = package
        self.endpoint: Final = endpoint
        self.base: ServedVersion = base or self
        self.endpoints: Final[dict[str, ServedVersion]] = {}
        """The same version at the other endpoints that have had jobs, by name."""
        self.successor: ServedVersion | None = None
        """What has taken the place of this one: the same version with another model in memory."""
        self.experiment = ""
        """The id of the experiment whose arm the version is; empty: none."""
        self.spec: Final[ModelSpec] = package.spec
        self.name: Final = package.spec.name
        self.label: Final = package.spec.version
        self.signature: Final[Signature] = package.spec.signature
        self.policy = self.policy_under(config, overlay)
        self.queue: Final = VersionQueue(self.name, self.policy)
        self._sharing: list[ServedVersion] = []
        """The endpoints that use this loaded model, and this one; empty: only this one does."""
        self._config = config
        self._gate = gate
        self.pinned_hash = ""
        """The content that was promoted under this label; empty: any content on disk may be loaded."""
        self.shares_model: Final = base is not None and base.policy.load_key == self.policy.load_key
        """Whether its model is the loaded model of the endpoint `infer`."""
        self.runtime: Runtime = self.base.runtime if self.shares_model else self._open()
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
        self._announced_tokens = 0
        """The limit in its spec; 0: that of its own engine."""
        self.is_wanted = False
        """Whether an operator asked for the version to be loaded."""
        self.used_at = 0.0
        """Monotonic seconds of the last batch, or of the last job that a cached answer ended."""
        self.calibrated_rows = 0
        """Rows that the device's memory allows, as measured; 0: not measured."""
        self._lost_before = 0
        """Instances that were lost under earlier runtimes."""
        self._has_shapes_only: Final = self.signature.is_of_shapes
        self._fits: dict[tuple[Tensor, ...], _Fit] = {}
        self._last_content: tuple[Tensor, ...] | None = None
        self._last_fit: _Fit | None = None
        if base is not None:
            self.calibrated_rows, self.pinned_hash = base.calibrated_rows, base.pinned_hash
            if self.calibrated_rows:
                self.queue.resize(self.calibrated_rows)
            if self.shares_model:
                base._share_with(self)

    def policy_under(self, config: InferenceConfig, overlay: Overlay | None) -> VersionPolicy:
        """The policy of this version at its endpoint under an overlay."""
        knobs = overlay.get(self.endpoint) if overlay else None
        return VersionPolicy.of(self.spec, config, self.endpoint, knobs)

    def follow(self, policy: VersionPolicy) -> None:
        """Keep to a policy with the same load key from the next batch on; jobs and model stay."""
        self.policy = policy
        self.queue.follow(policy)

    @cached_property
    def answers_as(self) -> str:
        """What cached answers and shared forwards are of: the label, with the endpoint and the number format where
        these are others than model.yaml says for `infer`."""
        usual = self.spec.policy_for(DEFAULT_ENDPOINT).precision or self._config.precision
        if self.endpoint == DEFAULT_ENDPOINT and self.policy.precision == usual:
            return self.label
        return f"{self.label} {self.endpoint} {self.policy.precision}"

    def _share_with(self, endpoint: ServedVersion) -> None:
        if not self._sharing:
            self._sharing = [self]
        self._sharing.append(endpoint)
        endpoint._sharing = self._sharing
        endpoint._take_state_of(self)

    def _take_state_of(self, base: ServedVersion) -> None:
        self.runtime, self.model, self.observer = base.runtime, base.model, base.observer
        self.last_hash, self.used_at = base.last_hash, base.used_at
        if base.calibrated_rows != self.calibrated_rows:
            self.calibrated_rows = base.calibrated_rows
            self.queue.resize(base.calibrated_rows)
        # It waits for the load of the other.
        self.state = VersionState.COLD if base.state is VersionState.LOADING else base.state
        self.problem, self.last_problem = base.problem, base.last_problem

    def _tell_sharing(self) -> None:
        """The endpoints that use this model have its state."""
        for endpoint in self._sharing:
            if endpoint is not self:
                endpoint._take_state_of(self)

    def take_observer(self, observer: Observer | None) -> None:
        """Take the observer of the loaded model, and the limit that it may know already."""
        for version in self._sharing or (self,):
            version.observer = observer
            version.follow_row_limit()

    @property
    def with_sharing(self) -> list[ServedVersion]:
        """This one, and the other endpoints that use its model."""
        return list(self._sharing) or [self]

    def retire(self) -> None:
        """Its model is used by this endpoint no more."""
        if self.shares_model and self in self._sharing:
            self._sharing.remove(self)

    @cached_property
    def spec_json(self) -> bytes:
        """The spec as workers announce it, again and again; see ModelSpec.to_json. A load may change its limits."""
        runtime = self.runtime
        spec = runtime.announced(self._announced_tokens) if isinstance(runtime, GenerateRuntime) else self.spec
        return spec.to_json()

    @property
    def most_tokens(self) -> int:
        """Of a prompt and its text, as many as its loaded engine has room for; 0: it has none, or it is not known."""
        runtime = self.runtime
        return (isinstance(runtime, GenerateRuntime) and self.is_ready and runtime.most_tokens) or 0

    def announce_limit(self, most_tokens: int) -> None:
        """The spec names this limit from now on, which is that of another worker; 0: that of the own engine."""
        if most_tokens != self._announced_tokens:
            self._announced_tokens = most_tokens
            self.__dict__.pop("spec_json", None)

    @property
    def content_hash(self) -> str:
        """SHA-256 of the loaded files; empty: nothing is loaded."""
        return self.model.content_hash

    @property
    def generation(self) -> int:
        """The generation of the form that answers the next batch; see Forms.generation."""
        forms = self.model.forms
        return forms.generation if forms is not None else 0

    @property
    def instances_lost(self) -> int:
        """How many instances were lost since the version is known here, over all its loads."""
        runtime = self.runtime
        return self._lost_before + (runtime.counts().get("instances_lost", 0) if isinstance(runtime, Counted) else 0)

    def generation_figures(self) -> GenerationFigures | None:
        """The figures of its engine; None without one. For the thread that reports."""
        runtime = self.runtime
        return runtime.take_figures() if isinstance(runtime, GenerateRuntime) and not self.shares_model else None

    def has_loaded(self, now: float = 0.0) -> None:
        """The runtime is ready for forwards since `now`, in monotonic seconds."""
        runtime = self.runtime
        self.state, self.problem, self.last_problem = VersionState.READY, "", ""
        # The loaded engine may lower a limit of the spec.
        self.__dict__.pop("spec_json", None)
        self.used_at = now
        self.queue.forget_forwards()
        self.last_hash = runtime.content_hash
        forms = forms_of(runtime)
        if forms is not None:
            forms.withholds_texts, forms.redact = self.policy.withholds_texts, self.policy.redact
            forms.chain = self.policy.chain
        self.model = LoadedModel(runtime, self.last_hash, forms)
        self._tell_sharing()

    def observe(self, batch: BatchObservation) -> None:
        """Lets the observer learn from a committed batch, and follows the limit that it may have found."""
        if self.observer is not None:
            self.observer.observe(batch)
            self.follow_row_limit()

    def follow_row_limit(self) -> None:
        """Forms smaller batches where the observer says so."""
        limit = self.observer.row_limit if self.observer is not None else 0
        if 0 < limit < self.queue.limits.max_rows:
            self.queue.resize(limit)

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
        for endpoint in self.endpoints.values():
            if not endpoint.shares_model:
                endpoint.pin_content(content_hash)

    def _renew(self) -> None:
        self._lost_before = self.instances_lost
        self.runtime = self._open()
        self.model = LoadedModel(self.runtime, "", None)
        self._tell_sharing()

    def _open(self) -> Runtime:
        return open_runtime(
            self.package,
            self.pinned_hash,
            frameworks=self._config.frameworks,
            precision=self.policy.precision,
            warmup_requests=self._config.compilation.warmup_requests,
            runtime_hosts=self._config.runtime_hosts,
            generate=partial(
                GenerateRuntime, cache_dir=self._config.compilation.cache_dir / "generation", gate=self._gate
            ),
        )

    @property
    def is_ready(self) -> bool:
        """Whether its forwards may begin."""
        return self.state is VersionState.READY

    @property
    def is_idle(self) -> bool:
        """Whether no job waits for its model or runs on it."""
        if self._sharing:
            return all([version.queue.is_idle for version in self._sharing])
        return self.queue.is_idle

    @property
    def may_start(self) -> int:
        """Forwards that the version's concurrency still allows."""
        if self.state is not VersionState.READY:
            return 0
        spare = self.policy.concurrency - self.queue.in_flight
        if not self._sharing:
            return spare
        # Together they run no more forwards of one model than the endpoint that may run most.
        most = max([version.policy.concurrency for version in self._sharing])
        return min(spare, most - sum([version.queue.in_flight for version in self._sharing]))

    @property
    def is_approved(self) -> bool:
        """Whether operators promoted, registered or requested the version, with this content if they named one."""
        return bool(self.pinned_hash) or self.is_wanted

    @property
    def room(self) -> int:
        """How many more jobs may wait for it. While it is not loaded: no more than its capacity."""
        return _NO_END if self.state is VersionState.READY else self.queue.free

    @property
    def free(self) -> int:
        """Jobs that may be claimed for it now: of an engine, as many as have a seat, and pages."""
        free = self.queue.free
        return free if not free or (left := self._pages_left) is None else max(0, min(free, left))

    @property
    def free_for_urgent(self) -> tuple[int, int]:
        """See VersionQueue.free_for_urgent. Beyond the pages, no more jobs may come in than beyond the seats."""
        free, least = self.queue.free_for_urgent
        if free and (left := self._pages_left) is not None:
            free = min(free, left + self.policy.concurrency - self.policy.seats)
        return (free, least) if free > 0 else (0, 0)

    @property
    def _pages_left(self) -> int | None:
        """For how many more jobs its engine has pages, below zero for too many jobs; None: it has no engine."""
        runtime = self.runtime
        room = runtime.room if self.policy.seats and isinstance(runtime, GenerateRuntime) else None
        return None if room is None else room - sum(version.queue.in_memory for version in self.with_sharing)

    @property
    def awaits_pages(self) -> bool:
        """Whether its engine has a free seat, and no pages for one more job."""
        return self.is_ready and self.queue.free > 0 and self.free == 0

    def is_named(self, name: str) -> bool:
        """Whether `name` is its label or, once it is loaded, the beginning of its content hash."""
        return is_name_of(name, self.label, self.content_hash)

    def fit(self, job: ClaimedJob) -> None:
        """Check a job against the signature that is served, and count its rows. Raises InvalidInput.

        If the signature holds only shapes, a job with the same description as an earlier one needs no second check:
        `check_values` looks for NaN in its whole batch.
        """
        if not self.knows(job):
            job.decoded = self.signature.check(job.inputs)
            job.rows = self.signature.rows(job.inputs)
            if self._has_shapes_only:
                self._learn(job)
        elif job.fell_back is not None:
            # Refused now, it ends with the failure of the version that it came to.
            self.signature.check_finite(job.inputs)
        if job.header.options.outputs:
            self.signature.select_outputs(job.header.options.outputs)
        if self.policy.tokenises and self.is_ready:
            self.runtime.check(job.inputs)

    def knows(self, job: ClaimedJob) -> bool:
        """Whether a job with the same description was found to fit; then the rows of this one are counted, too."""
        fit = self._fit_of(job.header.content)
        if fit is not None:
            job.rows = fit.rows
        return fit is not None

    def check_values(self, inputs: Iterable[Mapping[str, Array]]) -> None:
        """Check what `knows` has left open, right before a forward. inputs: see inputs_of. Raises InvalidInput."""
        if self._has_shapes_only:
            for arrays in inputs:
                self.signature.check_finite(arrays)

    def _fit_of(self, content: tuple[Tensor, ...]) -> _Fit | None:
        # Nearly all jobs of a claim share one object.
        if content is not self._last_content:
            self._last_content, self._last_fit = content, self._fits.get(content)
        return self._last_fit

    def _learn(self, job: ClaimedJob) -> None:
        content, key = job.header.content, self._key_of(job)
        if len(self._fits) >= _MOST_FITS:
            self._fits.clear()
        key = next((fit.key for fit in self._fits.values() if fit.key == key), key)
        self._last_content = content
        self._last_fit = self._fits[content] = _Fit(job.rows, key, self.runtime.length(job.inputs))

    def _key_of(self, job: ClaimedJob) -> BatchKey:
        return BatchKey(self.name, self.label, self.endpoint, self.signature.batch_key(job.inputs))

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

    def pending(self, jobs: Iterable[ClaimedJob]) -> list[Pending[ClaimedJob]]:
        """Jobs that fit, as the batcher sees them."""
        row_bytes = self.queue.row_bytes
        items = []
        for job in jobs:
            delivery, fit = job.delivery, self._fit_of(job.header.content)
            key, length = (fit.key, fit.length) if fit else (self._key_of(job), self.runtime.length(job.inputs))
            nbytes = len(delivery.sealed) + job.rows * row_bytes
            items.append(Pending(key, int(delivery.priority), job.rows, length, nbytes, job.claimed, job))
        return items

    def alone(self, job: ClaimedJob) -> Batch[ClaimedJob]:
        """A batch of this one job."""
        (item,) = self.pending([job])
        return Batch(item.key, [item], item.rows, item.rows * item.length, "idle", item.priority)


def routing_table(routing: Routing, endpoint: str = DEFAULT_ENDPOINT) -> RoutingTable:
    """The table by which workers assign an endpoint's jobs. Raises InvalidInput for arms that divide no traffic."""
    arms = tuple(Arm(arm.version, arm.weight) for arm in routing.arms)
    if endpoint in routing.shares and len(arms) == 2:
        share = routing.shares[endpoint]
        arms = (Arm(arms[0].version, share), Arm(arms[1].version, 1 - share))
    table = RoutingTable(arms, routing.experiment, routing.is_sticky)
    table.check()
    return table


class ServedArms:
    """The arms of one model, each with its version where this worker has it. The I/O thread owns it.

    admits: whether jobs may come to the version of this label. The version in production, which needs no leave, has the
    jobs of an arm that is not admitted.
    """

    def __init__(
        self,
        deployment: Deployment,
        routing: Routing,
        versions: Mapping[str, ServedVersion | None],
        admits: Callable[[str], bool] = lambda label: True,
    ) -> None:
        """Raises InvalidInput for arms that divide no traffic. versions: by label, with the one in production; None:
        not found here."""
        self.epoch: Final = deployment.epoch
        self.production: Final = deployment.version
        self.routing: Final = routing
        self.versions: Final = dict(versions)
        self._admits = admits
        self._table: Final = routing_table(routing)
        self._tables: Final = {endpoint: routing_table(routing, endpoint) for endpoint in routing.shares}
        self._contents: Final = {
            deployment.version: deployment.content_hash,
            **{arm.version: arm.content_hash for arm in routing.arms},
        }

    def label_for(self, header: JobHeader) -> str:
        """The label of the version that answers this job, which names none."""
        table = self._table
        if self._tables and header.options.endpoint:
            table = self._tables.get(header.options.endpoint, table)
        key = (header.options.sticky_key or header.tenant) if table.is_sticky else header.id
        label = table.version_for(key)
        return label if self.admits(label) else self.production

    def admits(self, label: str) -> bool:
        """Whether jobs may come to this arm: its circuit breaker is not open."""
        return label == self.production or self._admits(label)

    def shares(self) -> dict[str, float]:
        """The present share of each arm. One that is not admitted has none, and the version in production has its."""
        shares = {arm.version: arm.weight for arm in self.routing.arms}
        for label in [label for label in shares if not self.admits(label)]:
            shares[self.production] = shares.get(self.production, 0.0) + shares[label]
            shares[label] = 0.0
        return shares

    def content_of(self, label: str) -> str:
        """The content hash under which other workers report this arm."""
        return self._contents[label]

    def ready_version(self, label: str) -> ServedVersion | None:
        """The version of this arm, if its forwards may begin here."""
        version = self.versions.get(label)
        return version if version is not None and version.is_ready else None

    def here(self) -> list[ServedVersion]:
        """The versions of the arms that this worker has found."""
        return [version for version in self.versions.values() if version is not None]


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
        self.arms: ServedArms | None = None
        """The versions that share the jobs that name none, while an experiment runs."""
        self.overlay: Overlay = {}
        """The knobs that operators have set, by endpoint."""

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
        return active.free if active is not None and active.state in _CLAIMABLE else 0

    @property
    def awaits_pages(self) -> bool:
        """See ServedVersion.awaits_pages. No event tells when there are more."""
        return self.active is not None and self.active.awaits_pages

    @property
    def free_for_urgent(self) -> tuple[int, int]:
        """See VersionQueue.free_for_urgent."""
        active = self.active
        return active.free_for_urgent if active is not None and active.is_ready else (0, 0)

    def answers(self, version: ServedVersion) -> bool:
        """Whether jobs that name no version may come to this version now."""
        version = version.base
        return version is self.active or (self.arms is not None and version in self.arms.here())

    def answering(self, version: ServedVersion | None) -> ServedVersion | None:
        """This version, if jobs that name none may come to it now; otherwise the active one."""
        return version if version is not None and self.answers(version) else self.active

    def named(self, name: str) -> ServedVersion | None:
        """The version of this label or beginning of a content hash, if it is known here."""
        return self.versions.get(name) or next((each for each in self.versions.values() if each.is_named(name)), None)
