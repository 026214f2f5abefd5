"""The models that a worker serves, each in one or more versions side by side.

    claim --> ServedModel.route: the version that the job names, else the one that answers --> its batcher
              ServedVersion: cold -> loading -> ready, or failed; its runtime, its pending jobs, its limits

A version that is not loaded may have pending jobs: they wait for it. Batches never mix versions, for each has a
batcher of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from enum import Enum
from math import inf
from typing import Final

from penstock.registry.deployment import Deployment
from penstock.registry.envelope import Failure
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec, Package
from penstock.registry.package.signature import Signature
from penstock.registry.settings import InferenceConfig
from penstock.registry.tensors import STRING, Tensor
from penstock.workers.batching.batcher import Batch, Batcher, BatchKey, BatchLimits, Pending
from penstock.workers.batching.controller import LatencyController
from penstock.workers.executor import BatchRun, JobStream, TooLarge
from penstock.workers.job import ClaimedJob
from penstock.workers.runtime.base import Runtime
from penstock.workers.runtime.forms import Forms, Tunable
from penstock.workers.runtime.open import open_runtime
from penstock.workers.versions.tuner import AnsweredJob, BatchObservation, Observer

__all__ = ["ENDPOINT", "ServedModel", "ServedVersion", "VersionState", "batch_limits", "is_name_of"]

logger = logging.getLogger("penstock.server")

ENDPOINT: Final = "infer"
"""The endpoint label of jobs that are plain forwards."""
_CPU_BATCH: Final = 32
"""Rows of a batch where neither the package nor a setting says: what a CPU gains from more is little."""
_CPU_OVERHEAD: Final = 128
"""A forward's fixed cost in tokens, measured with MiniLM on one CPU thread; see BatchLimits."""
_SLICED_OVERHEAD: Final = 1 << 20
"""For a runtime that cuts its batches by length itself: fill them, and only then look for similar lengths."""
_CAP_HOLDS_S: Final = 300.0
"""A learnt cap is doubled after so long without a batch that did not fit."""
_LONGEST_ROW: Final = 8192
"""A cap of tokens beyond full batches of such rows limits nothing."""
_BATCHES_HELD: Final = 2
"""One running, one ready; a model that sorts by length holds its window as well."""
_NO_END: Final = 1 << 20
_BATCHING_LEVEL: Final = 2
_SHORTEST_PREFIX: Final = 6
"""Hex digits of a content hash that may stand for a version."""


def batch_limits(spec: ModelSpec, config: InferenceConfig) -> BatchLimits:
    """The limits of a model's batches: the package's own, else the settings'."""
    batching, own = config.batching, spec.batching
    level = config.max_level if spec.max_level is None else min(config.max_level, spec.max_level)
    may_batch = config.enabled and batching.enabled and level >= _BATCHING_LEVEL and not spec.streams
    window_ms = spec.policy_for(ENDPOINT).window_ms
    wait_ms = batching.max_wait_ms if window_ms is None else window_ms
    return BatchLimits(
        max_rows=(own.max_batch_size or batching.max_batch_size or _CPU_BATCH) if may_batch else 1,
        max_wait_s=wait_ms / 1000,
        max_tokens=own.max_tokens or 0,
        max_bytes=own.max_bytes or 0,
        sort_window=own.sort_window if may_batch else 1,
        ageing_s=config.queue.ageing_s,
        overhead_tokens=_SLICED_OVERHEAD if spec.format == "transformers" else _CPU_OVERHEAD,
    )


def is_name_of(name: str, label: str, content_hash: str) -> bool:
    """Whether a job that names this version means the one of that label and content."""
    return name == label or (len(name) >= _SHORTEST_PREFIX and content_hash.startswith(name))


class VersionState(Enum):
    """Where a version is on its way into memory."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    FAILED = "failed"


_TO_BE_HAD: Final = (VersionState.READY, VersionState.COLD)


class ServedVersion:
    """One version of a model in this worker. The I/O thread owns it, but for the runtime's loads and forwards."""

    def __init__(self, package: Package, config: InferenceConfig) -> None:
        self.package: Final = package
        self.spec: Final = package.spec
        self.name: Final = package.spec.name
        self.label: Final = package.spec.version
        self.signature: Final[Signature] = package.spec.signature
        self.pinned_hash = ""
        """The content that was promoted under this label; empty: whatever lies on disk will do."""
        self._config = config
        knobs = self.spec.policy_for(ENDPOINT)
        self.concurrency: Final = knobs.concurrency or 1
        """Forwards that may run at the same time."""
        self._precision: Final = knobs.precision or config.precision
        self.runtime: Runtime = self._open()
        self.observer: Observer | None = None
        """Hears of every batch that was committed, while the version is loaded."""
        self.state = VersionState.COLD
        self.content_hash = ""
        """SHA-256 of what is loaded; empty where nothing is."""
        self.last_hash = ""
        """SHA-256 of what was loaded last."""
        self._forms: Forms | None = None
        self.problem = ""
        """Why it could not be loaded."""
        self.is_wanted = False
        """Whether an operator asked for it to be loaded."""
        self.used_at = 0.0
        """Monotonic seconds of its last batch, or of the last job that a kept answer ended."""
        self.calibrated_rows = 0
        """Rows that the device's memory was found to allow; 0: not measured."""
        self.timeout_s: Final = float(self.spec.timeout_s or config.timeout_seconds)
        repeats = config.enabled and self.spec.deterministic and not self.spec.streams
        self.shares_flights: Final = repeats and config.batching.single_flight
        """Whether equal jobs that are here at the same time have one forward."""
        ttl_s = config.cache.ttl_seconds if knobs.cache_ttl_s is None else knobs.cache_ttl_s
        hides_inputs = "hashes_only" in (config.privacy.mode, config.cache.privacy_mode)
        # Text may repeat what was asked.
        may_keep = config.cache.enabled and not (hides_inputs and any(out.dtype == STRING for out in self.spec.outputs))
        self.cache_ttl_s: Final = ttl_s if repeats and may_keep else 0.0
        """For how many seconds its answers are kept; 0: not at all."""
        self.finite_outputs: Final = tuple(
            output.name for output in self.spec.outputs if output.dtype.startswith("float") and not output.allow_nan
        )
        self._fitting: tuple[tuple[Tensor, ...] | None, int] = (None, 0)
        self.in_memory = 0
        """Jobs that wait or run; not those that follow an equal one, nor those that rest between two tries."""
        self.in_flight = 0
        """Batches handed to the model threads."""
        self._keep_to(batch_limits(self.spec, config))

    def _keep_to(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.batcher: Batcher[ClaimedJob] = Batcher(limits)
        window = limits.max_rows * limits.sort_window if limits.sort_window > 1 else 0
        self.capacity = limits.max_rows * _BATCHES_HELD * self.concurrency + window
        self._controller = (
            LatencyController(self._config.batching.target_latency_ms / 1000, limits.max_rows, limits.max_wait_s)
            if limits.max_rows > 1
            else None
        )
        self._cap = TooLarge(limits.max_rows, 0)
        """Rows and padded tokens that a batch may have; 0 tokens: no limit but the package's."""
        self._raise_cap_at = inf

    @property
    def is_sized_by_memory(self) -> bool:
        """Whether neither the package nor a setting says how large a batch may be: on a GPU its memory does."""
        batching = self._config.batching
        return self.limits.max_rows > 1 and not (self.spec.batching.max_batch_size or batching.max_batch_size)

    def resize(self, rows: int) -> None:
        """From now on batches have up to so many rows; what is pending stays so."""
        pending = self.batcher.discard(lambda _: True)
        self._keep_to(replace(self.limits, max_rows=rows))
        self.batcher.extend(pending)

    def has_loaded(self, now: float = 0.0) -> None:
        """The runtime is ready for forwards, since `now` in monotonic seconds."""
        self.state, self.problem = VersionState.READY, ""
        self.used_at = now
        self.content_hash = self.last_hash = self.runtime.content_hash
        self._forms = self.runtime.forms if isinstance(self.runtime, Tunable) else None

    def has_failed(self, problem: str) -> None:
        """The runtime could not be loaded; another takes its place for the next try."""
        self.state, self.problem = VersionState.FAILED, problem
        self._renew()

    def unload(self) -> None:
        """Lets go of the runtime; the next load begins afresh."""
        self.observer = self._forms = None
        self.content_hash = ""
        self.runtime.close()
        self.state = VersionState.COLD
        self._renew()

    @property
    def is_ready(self) -> bool:
        """Whether forwards of it may begin."""
        return self.state is VersionState.READY

    @property
    def is_idle(self) -> bool:
        """Whether no job waits for it or runs on it."""
        return self.in_flight == 0 and self.batcher.most_urgent() is None

    @property
    def may_start(self) -> int:
        """Forwards that the version's concurrency still allows."""
        return self.concurrency - self.in_flight if self.is_ready else 0

    @property
    def form(self) -> int:
        """The form in which it answers the next batch; see Forms.generation."""
        return self._forms.generation if self._forms is not None else 0

    @property
    def tokenises(self) -> bool:
        """Whether preparing a batch is worth doing beside another forward."""
        return self.spec.format == "transformers"

    @property
    def is_approved(self) -> bool:
        """Whether operators have promoted it, or asked for it to be loaded: this content of it, where they said."""
        return bool(self.pinned_hash) or self.is_wanted

    @property
    def room(self) -> int:
        """How many more jobs may wait for it, as far as it goes: while it is not loaded, no more than it could run."""
        return _NO_END if self.is_ready else max(0, self.capacity - self.in_memory)

    def is_named(self, name: str) -> bool:
        """Whether `name` is its label or, once it is loaded, the beginning of its content hash."""
        return is_name_of(name, self.label, self.content_hash)

    def _renew(self) -> None:
        """Forgets the runtime that was closed, or whose load was given up: the next load begins afresh."""
        self.runtime = self._open()

    def _open(self) -> Runtime:
        return open_runtime(
            self.package,
            self.pinned_hash,
            frameworks=self._config.frameworks,
            precision=self._precision,
            warmup_requests=self._config.compilation.warmup_requests,
        )

    def pin_content(self, content_hash: str) -> None:
        """This content, and no other, was promoted under the version's label."""
        self.pinned_hash = content_hash
        if self.state in (VersionState.COLD, VersionState.FAILED):
            self.state = VersionState.COLD
            self._renew()

    def cap_batches(self, too_large: TooLarge, now: float) -> None:
        """Some forward did not fit the device: half of it is the cap of batches, until it has held for a while.

        Where forwards have tokens these are what did not fit: short texts may still come in full batches.
        """
        rows, tokens = self._cap
        if too_large.tokens:
            tokens = min(tokens or too_large.tokens, max(1, too_large.tokens // 2))
        else:
            rows = min(rows, max(1, too_large.rows // 2))
        self._set_cap(rows, tokens, now)
        logger.warning("batches are capped", extra={"model": self.name, "max_rows": rows, "max_tokens": tokens})

    def raise_cap(self, now: float) -> None:
        """Doubles a learnt cap that has held: what filled the device may have left it."""
        if now >= self._raise_cap_at:
            rows, tokens = self._cap
            tokens = 0 if tokens > self.limits.max_rows * _LONGEST_ROW else tokens * 2
            self._set_cap(min(self.limits.max_rows, rows * 2), tokens, now)

    def _set_cap(self, rows: int, tokens: int, now: float) -> None:
        self._cap = TooLarge(rows, tokens)
        self._raise_cap_at = now + _CAP_HOLDS_S if self.is_capped else inf
        self.batcher.narrow(rows, tokens)

    @property
    def is_capped(self) -> bool:
        """Whether batches are smaller than they may be, for want of device memory."""
        return self._cap != (self.limits.max_rows, 0)

    @property
    def max_rows(self) -> int:
        """Rows of the largest batch that is formed now."""
        return self._cap.rows

    def fit(self, job: ClaimedJob) -> None:
        """Checks a job against the signature that is served, and counts its rows. Raises InvalidInput.

        Where shapes say all, a job described like the one before needs no second look: its values were checked
        before it was accepted, and NaN harms nobody but itself.
        """
        content, rows = self._fitting
        if job.header.content == content:
            job.rows = rows
        else:
            job.inputs = self.signature.check(job.inputs)
            job.rows = self.signature.rows(job.inputs)
            if self.signature.is_of_shapes:
                self._fitting = (job.header.content, job.rows)
        if job.header.options.outputs:
            self.signature.select_outputs(job.header.options.outputs)
        if self.tokenises and self.is_ready:
            self.runtime.check(job.inputs)

    def misfits(self) -> list[tuple[ClaimedJob, InvalidInput]]:
        """Takes out the pending jobs that only the model itself finds too long, now that it is loaded."""
        found: list[tuple[ClaimedJob, InvalidInput]] = []

        def is_too_long(item: Pending[ClaimedJob]) -> bool:
            try:
                self.runtime.check(item.job.inputs)
            except InvalidInput as error:
                found.append((item.job, error))
                return True
            return False

        if self.tokenises:
            self.batcher.discard(is_too_long)
        return found

    def observe(self, work: BatchRun, now: float) -> None:
        """A batch was committed at `now`: what it took steers the next ones.

        The observer learns nothing of batches that ran as built. They would distort the time of the form in use, and
        their jobs may have ended a process, so no other form is tried on them.
        """
        if self._controller is not None:
            jobs = [item.job for item in work.batch.items]
            totals_s = [job.queue_ms / 1000 + now - job.claimed for job in jobs]
            self._controller.observe(work.batch, work.ended - work.started, totals_s, len(self.batcher), now)
            self.batcher.steer(self._controller.rows, self._controller.wait_s)
        if self.observer is not None and not work.is_as_built:
            seconds = work.ended - work.started
            self.observer.observe(BatchObservation(work.batch.rows, work.tokens, seconds, _answered(work)))

    def reserve(self, job: ClaimedJob) -> None:
        """The job waits or runs here."""
        self.in_memory += not job.takes_room
        job.takes_room = True

    def release(self, job: ClaimedJob) -> None:
        """The job no longer waits or runs here."""
        self.in_memory -= job.takes_room
        job.takes_room = False

    def add(self, jobs: list[ClaimedJob]) -> None:
        """Puts jobs before the batcher, in their order of arrival."""
        for job in jobs:
            self.reserve(job)
        self.batcher.extend([self._pending(job) for job in jobs])

    def alone(self, job: ClaimedJob) -> Batch[ClaimedJob]:
        """A batch of this one job."""
        item = self._pending(job)
        return Batch(item.key, [item], item.rows, item.rows * item.length, "idle", item.priority)

    def _pending(self, job: ClaimedJob) -> Pending[ClaimedJob]:
        inputs = job.inputs
        shape = self.signature.batch_key(inputs)
        nbytes = sum(values.nbytes for values in inputs.values()) if self.limits.max_bytes else 0
        return Pending(
            BatchKey(self.name, self.label, ENDPOINT, shape),
            int(job.delivery.priority),
            job.rows,
            self.runtime.length(inputs),
            nbytes,
            job.claimed,
            job,
        )

    def work(
        self,
        batch: Batch[ClaimedJob],
        open_stream: Callable[[ClaimedJob, Callable[[], None]], JobStream],
        *,
        is_as_built: bool = False,
    ) -> BatchRun:
        """A batch ready for the model threads; is_as_built: see Work."""
        return BatchRun(
            batch,
            self.runtime,
            self._cap.rows,
            self.finite_outputs,
            open_stream if self.spec.streams else None,
            self.timeout_s,
            self.content_hash,
            self._forms,
            self.form,
            is_as_built,
        )


def _answered(work: BatchRun) -> Iterator[AnsweredJob]:
    for item, answer in zip(work.batch.items, work.answers, strict=True):
        if not isinstance(answer, Failure):
            yield AnsweredJob(item.job.header.id, item.job.inputs, answer)


class ServedModel:
    """One model in this worker: the versions it has here, which of them answers, and what the model may hold.

    `active` is None while the version that answers is not to be had here: then nothing is claimed.
    """

    def __init__(self, name: str, active: ServedVersion | None) -> None:
        self.name: Final = name
        self.versions: Final[dict[str, ServedVersion]] = {}
        """By label."""
        self.active = active
        if active is not None:
            self.versions[active.label] = active
        self.record = b""
        """The record of the active version as the last delivery brought it along."""
        self.deployment: Deployment | None = None
        """What that says; None before the first promotion: then the highest version on disk that loads answers."""
        self.decided = b""
        """The record that says so, as it was believed."""
        self.is_empty = False
        """Whether the last claim found fewer jobs than it asked for."""

    @property
    def content_hash(self) -> str:
        """What answers hashes to; empty while nobody knows."""
        if self.deployment is not None:
            return self.deployment.content_hash
        return self.active.last_hash if self.active is not None else ""

    @property
    def label(self) -> str:
        """The version that answers jobs that name none; empty while it is not to be had here."""
        return self.active.label if self.active is not None else ""

    @property
    def is_claimable(self) -> bool:
        """Whether the version that answers is to be had here: while it is being loaded its jobs are for others."""
        active = self.active
        return active is not None and active.state in _TO_BE_HAD

    @property
    def free(self) -> int:
        """Jobs that may be claimed now."""
        active = self.active
        return max(0, active.capacity - active.in_memory) if active is not None and self.is_claimable else 0

    def named(self, name: str) -> ServedVersion | None:
        """The version of this label or beginning of a content hash, if it has been met here."""
        return self.versions.get(name) or next((each for each in self.versions.values() if each.is_named(name)), None)
