"""The part of both clients that does no I/O: arguments, settings, admission limits, job builder, spec cache, handles.

    submit, submit_many, map, generate   arguments -> SubmitOptions -> _submit, _submit_many, _map of either client

The public methods stand here once, for both clients. A client adds a broker connection, a reply reader, and how it
publishes, waits and sleeps. After a fork, the child gives each client a new connection and reader: the old ones belong
to the parent.
"""

from __future__ import annotations

import os
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NoReturn, Protocol, Self, TypeAlias, TypeVar, cast, overload

from penstock.producers.job_state import HandleCore, JobState, ResultPolicy, checked_timeout, positive_timeout
from penstock.producers.rows import MAP_WINDOW, MapOrder, MapRun, OnError, RowShape
from penstock.producers.stack_start import LONGEST_START_S, StackStart
from penstock.producers.submission import ItemIndex, SubmitRun, accepted, is_elsewhere, with_keys
from penstock.producers.unusable import closed
from penstock.registry import stack_file
from penstock.registry.admission import JobBuilder, SpecCache, SubmitOptions, limits_of
from penstock.registry.broker.base import Announced, Publication, Receipt
from penstock.registry.envelope import Retry
from penstock.registry.errors import ClientUnusable, InvalidInput, Rejected, described
from penstock.registry.key_reports import check_keys
from penstock.registry.queues import PriorityName, slot_of

if TYPE_CHECKING:
    from penstock.producers.cached_answers import CachedAnswer, CachedAnswers
    from penstock.producers.publish_spans import PublishSpans
    from penstock.registry.package import ModelSpec
    from penstock.registry.sampling_params import SamplingParams
    from penstock.registry.settings import Settings

__all__ = ["ClientCore", "Inputs", "Item", "Items", "Refused", "Untaken"]

Inputs: TypeAlias = Mapping[str, object]
Item: TypeAlias = tuple[Inputs | InvalidInput, str | None]
Items: TypeAlias = Iterable[Item]
"""Inputs, or the error in their place, each with its idempotency key."""
Refused: TypeAlias = dict[int, InvalidInput] | None
"""Takes the errors of bad items by index. None: the first one is raised."""
Untaken: TypeAlias = dict[int, Rejected] | None
"""Takes why the broker did not take items, by index. None: the first conflict is raised."""
SamplingOptions: TypeAlias = "SamplingParams | Mapping[str, Any] | None"
"""How a text is generated: SamplingParams, or a mapping of its fields."""
Handle = TypeVar("Handle", bound=HandleCore)
Submitted = TypeVar("Submitted")
SubmittedMany = TypeVar("SubmittedMany")
Mapped = TypeVar("Mapped")
MappedWhole = TypeVar("MappedWhole")


class _Reader(Protocol):
    """The reply reader of either client, as far as a new job needs it."""

    def address(self, slot: str) -> str: ...

    def expect_all(self, jobs: Sequence[JobState]) -> None: ...


class ClientCore(ABC, Generic[Handle, Submitted, SubmittedMany, Mapped, MappedWhole]):
    """The common part of Client and AsyncClient. The type parameters are what its methods return."""

    _reader: _Reader
    _awaits = False
    """Whether the calls of this client are awaited."""

    def __init__(
        self,
        url: str,
        *,
        tenant: str | None = None,
        signing_keys: str | None = None,
        timeout_s: float = 5.0,
        models_root: str | Path | None = None,
        settings: Settings | None = None,
    ) -> None:
        # For the first client, as the settings are.
        from penstock.safety.payload_keys import envelope_keys

        timeout_s = positive_timeout(timeout_s)
        settings = _client_settings(settings, tenant=tenant, signing_keys=signing_keys, models_root=models_root)
        queue = settings.inference.queue
        self.tenant = settings.tenant_id
        self._limits = limits_of(queue)
        self._builder = JobBuilder.of(settings, envelope_keys(settings))
        self._specs = SpecCache(settings.inference.repo_root)
        self._policy = ResultPolicy(self._builder.keyring, queue.result_ttl_s)
        self._cached = _cached_answers(settings)
        self._spans = _publish_spans(settings, awaits=self._awaits)
        self._is_closed = False
        self._connect(url, timeout_s, int(queue.result_ttl_s * 1000))
        _clients.add(self)

    @classmethod
    def from_env(
        cls,
        *,
        timeout_s: float = 5.0,
        start_timeout_s: float = LONGEST_START_S,
        settings: Settings | None = None,
    ) -> Self:
        """A client of the broker in the settings. Without one, of the embedded stack that runs in this home.

        start_timeout_s: the longest wait for a stack that is starting. `Client` waits here; `AsyncClient` waits in
        `async with` or before its first submit. Raises ConfigurationError when no stack runs or starts, or when it
        ends meanwhile, and BrokerUnavailable after the time.
        """
        settings = settings or _loaded_settings()
        start = StackStart.of(settings, start_timeout_s)
        settings = stack_file.with_broker(settings)
        client = cls(settings.redis_url or "", timeout_s=timeout_s, settings=settings)
        if start is not None:
            client._await_start(start)
        return client

    def submit(
        self,
        model: str,
        inputs: Inputs,
        *,
        priority: PriorityName = "normal",
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        retry: Retry | None = None,
        webhook: str | None = None,
        sticky_key: str | None = None,
        endpoint: str | None = None,
        options: SamplingOptions = None,
    ) -> Submitted:
        """Publishes one job and returns its handle. In AsyncClient, await it.

        inputs: name -> NumPy array, or nested lists. Text is str in lists; one str is one row. Numbers of another dtype
        than the declared one are converted where each keeps its meaning; a float is rounded.
        priority: critical, high, normal or low.
        deadline_s: seconds from now after which the job must not start, and a generated text must have ended. None
        means no deadline.
        idempotency_key: a second submit with this key and the same model, version and inputs returns the first job.
        tenant, version: None means the client's tenant and the active version of the model.
        outputs: the names of the requested outputs. Empty means all.
        traceparent: the W3C trace context of the caller, for the worker's log lines and spans of the job. Empty: that
        of the present OpenTelemetry span, if open_telemetry.traces is on.
        retry: how often and after which pauses a failed forward is repeated. None: the first failure ends the job.
        webhook: an https URL that gets a signed POST when the job has ended in any way; see docs/how-to/submit.md.
        sticky_key: names the user, so that a sticky A/B experiment answers all its jobs with one version. None: the
        tenant.
        endpoint: one of the model's endpoints, whose policy the job has; see docs/how-to/policies.md. None: `infer`.
        options: the sampling parameters of a model that generates text; see docs/how-to/generate.md.
        Raises BrokerUnavailable, or a Rejected error such as QueueFull before anything is written.
        """
        submitted = SubmitOptions(
            priority, deadline_s, tenant, version, outputs, traceparent, retry, webhook, sticky_key, endpoint
        )
        inputs = _with_sampling(inputs, options)
        if self._spans is not None:
            publish = partial(self._submit, model, inputs, key=idempotency_key)
            return cast(Submitted, self._spans.publish(model, submitted, publish))
        return self._submit(model, inputs, submitted, idempotency_key)

    def submit_many(
        self,
        model: str,
        batches: Iterable[Inputs],
        *,
        priority: PriorityName = "normal",
        deadline_s: float | None = None,
        idempotency_keys: Iterable[str | None] | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        retry: Retry | None = None,
        webhook: str | None = None,
        sticky_key: str | None = None,
        endpoint: str | None = None,
        options: SamplingOptions = None,
        timeout_s: float | None = None,
    ) -> SubmittedMany:
        """Publishes one job for each item of `batches` and returns their handles in order. In AsyncClient, await it.

        All items are checked before the first is written. One call carries a few hundred jobs. While the queue is
        full, the client waits for room.
        idempotency_keys: one for each item; None means no key for that item. The other arguments: as for `submit`.
        timeout_s: the longest wait for room. None means no limit. Then QueueFull is raised; the jobs that were
        accepted stay accepted, and `error.accepted` holds their handles. IdempotencyConflict carries them, too, and
        BrokerUnavailable, whose `error.in_doubt` holds the handles of the jobs without an answer.
        """
        submitted = SubmitOptions(
            priority, deadline_s, tenant, version, outputs, traceparent, retry, webhook, sticky_key, endpoint
        )
        if options is not None:
            batches = [_with_sampling(inputs, options) for inputs in batches]
        items = with_keys(batches, idempotency_keys)
        if self._spans is not None:
            publish = partial(self._submit_many, model, items, timeout_s=timeout_s)
            return cast(SubmittedMany, self._spans.publish(model, submitted, publish))
        return self._submit_many(model, items, submitted, timeout_s=timeout_s)

    # Mappings give whole outputs; rows give what the model's signature says, which no type checker knows. An array is
    # no sequence for a type checker: its elements could be anything.
    @overload
    def map(
        self,
        model: str,
        items: Sequence[Inputs] | Iterator[Inputs],
        *,
        priority: PriorityName = "normal",
        deadline_s: float | None = None,
        idempotency_keys: Iterable[str | None] | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        retry: Retry | None = None,
        webhook: str | None = None,
        sticky_key: str | None = None,
        endpoint: str | None = None,
        progress: bool | Callable[[int], None] = False,
        on_error: Literal["raise"] = "raise",
        window: int = MAP_WINDOW,
    ) -> MappedWhole: ...

    @overload
    def map(
        self,
        model: str,
        items: Iterable[Any],
        *,
        priority: PriorityName = "normal",
        deadline_s: float | None = None,
        idempotency_keys: Iterable[str | None] | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        retry: Retry | None = None,
        webhook: str | None = None,
        sticky_key: str | None = None,
        endpoint: str | None = None,
        progress: bool | Callable[[int], None] = False,
        on_error: OnError = "raise",
        window: int = MAP_WINDOW,
    ) -> Mapped: ...

    def map(
        self,
        model: str,
        items: Iterable[Any],
        *,
        priority: PriorityName = "normal",
        deadline_s: float | None = None,
        idempotency_keys: Iterable[str | None] | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        retry: Retry | None = None,
        webhook: str | None = None,
        sticky_key: str | None = None,
        endpoint: str | None = None,
        progress: bool | Callable[[int], None] = False,
        on_error: OnError = "raise",
        window: int = MAP_WINDOW,
    ) -> Any:
        """Submits one job for each item and returns the results in the order of the items. In AsyncClient, await it.

        An item is a mapping of inputs as for `submit`. For a model with one required input, it may also be one row of
        that input: a sentence, a vector. A row gives a row: of the model's only output, or of the only name in
        `outputs`; otherwise a dict of rows by name. A mapping gives whole outputs.
        idempotency_keys: one for each item; None means no key for that item. The other options: as for `submit`.
        progress: True draws a bar; a function gets the count of finished jobs.
        on_error: "raise" raises the first failed job and cancels those that wait. "return" puts the error of a failed
        job, or of an item that was refused, in its place.
        window: the largest number of jobs in flight.
        """
        options = SubmitOptions(
            priority, deadline_s, tenant, version, outputs, traceparent, retry, webhook, sticky_key, endpoint
        )
        return self._mapped(model, options, MapOrder(items, idempotency_keys, progress, on_error, window))

    def generate(
        self,
        model: str,
        prompts: str | Sequence[Any],
        sampling_params: SamplingOptions = None,
        *,
        priority: PriorityName = "normal",
        deadline_s: float | None = None,
        tenant: str | None = None,
        version: str | None = None,
    ) -> MappedWhole:
        """Generates a text for each prompt; returns the outputs in the order of the prompts. In AsyncClient, await it.

        prompts: one, or several; each is a text, its token ids, or a mapping of inputs. sampling_params: of all of
        them. The other arguments: as for `submit`. The first failed job is raised, and cancels those that wait.
        Raises InvalidInput for any bad prompt or parameter before anything is queued.
        """
        from penstock.registry.generation_inputs import as_inputs

        items = [_with_sampling(as_inputs(prompt), sampling_params) for prompt in _several(prompts)]
        order = MapOrder(items, None, False, "raise", max(1, 4 * len(items)))
        return cast(MappedWhole, self._mapped(model, SubmitOptions(priority, deadline_s, tenant, version), order))

    def __reduce__(self) -> NoReturn:
        raise ClientUnusable(
            "This client cannot be pickled or copied: its connections and keys belong to this process. "
            "Expected a client that each process makes, and handles or ids of jobs"
        )

    def job(self, job: str | HandleCore, *, tenant: str | None = None) -> Handle:
        """The handle of any job from its id, or from a handle of another client or process.

        tenant: None means that of the handle, or the client's for an id. It asks the broker nothing yet.
        """
        self._check_open()
        if isinstance(job, HandleCore):
            if job._client is self and tenant in (None, job.tenant):
                # It may await a reply, which no other handle would get.
                return cast(Handle, job)
            job_id, tenant = job.id, tenant or job.tenant
        else:
            job_id = job
        slot_of(job_id)
        return self._find(job_id, tenant or self.tenant)

    @abstractmethod
    def _connect(self, url: str, timeout_s: float, result_ttl_ms: int) -> None:
        """Makes the broker connection and the reply reader."""

    def _await_start(self, start: StackStart) -> None:
        """Waits for a stack that is starting. AsyncClient does so later."""
        start.wait()

    @abstractmethod
    def _leave_parent(self) -> None:
        """In a forked child: replaces the connection and the reply reader of the parent."""

    @abstractmethod
    def _handles(self, states: Iterable[JobState]) -> list[Handle]: ...

    @abstractmethod
    def _submit(self, model: str, inputs: Inputs, options: SubmitOptions, key: str | None) -> Submitted: ...

    @abstractmethod
    def _submit_many(
        self,
        model: str,
        items: Items,
        options: SubmitOptions,
        *,
        first_index: int = 0,
        refused: Refused = None,
        timeout_s: float | None = None,
    ) -> SubmittedMany: ...

    @abstractmethod
    def _map(self, model: str, options: SubmitOptions, order: MapOrder) -> Mapped: ...

    def _mapped(self, model: str, options: SubmitOptions, order: MapOrder) -> Any:
        if self._spans is not None:
            return self._spans.publish(model, options, partial(self._map, model, order=order))
        return self._map(model, options, order)

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed()

    def _spec_of(self, found: Announced) -> bytes | None:
        """The spec that was read. Raises Unauthorized when no live worker has the signing keys of this process."""
        check_keys(self._builder.keyring, found.key_reports)
        return found.spec

    def _find(self, job_id: str, tenant: str) -> Handle:
        return self._handle(JobState(job_id, tenant, self._policy, awaits_reply=False))

    def _handle(self, state: JobState) -> Handle:
        (handle,) = self._handles((state,))
        return handle

    def _known(self, job_id: str, tenant: str) -> Handle:
        """The handle of a job that the broker has just named."""
        state = JobState(job_id, tenant, self._policy, awaits_reply=False, seen_at=time.monotonic())
        return self._handle(state)

    def _track(self, jobs: Sequence[Publication]) -> list[Handle]:
        """The handles of jobs of one deadline that are published next: replies may come before the call returns."""
        now, policy = time.monotonic(), self._policy
        look_at = now + jobs[0].lifetime_ms(self._limits.job_ttl_ms) / 1000
        states = [
            JobState(job.job_id, job.tenant, policy, awaits_reply=True, look_at=look_at, seen_at=now) for job in jobs
        ]
        self._reader.expect_all(states)
        return self._handles(states)

    def _new_job(
        self, spec: ModelSpec, inputs: Inputs, options: SubmitOptions, key: str | None
    ) -> tuple[Publication, Handle]:
        reply = self._reader.address(spec.name)
        job = self._builder.build(spec, inputs, options, idempotency_key=key, reply=reply)
        now = time.monotonic()
        look_at = now + job.lifetime_ms(self._limits.job_ttl_ms) / 1000
        state = JobState(job.job_id, job.tenant, self._policy, True, look_at, now)
        self._reader.expect_all((state,))
        return job, self._handle(state)

    def _accepted(self, handle: Handle, receipt: Receipt, model: str) -> Handle:
        """The handle of the job that answers. It is an earlier job when the idempotency key belongs to one."""
        if receipt.outcome == "accepted":
            return handle
        job_id = accepted(receipt, model)
        return self._known(job_id, handle.tenant) if is_elsewhere(receipt, handle._state.id) else handle

    def _submit_run(
        self,
        spec: ModelSpec,
        items: Items,
        options: SubmitOptions,
        first_index: int,
        refused: Refused,
        timeout_s: float | None,
        found: Mapping[int, CachedAnswer],
        untaken: Untaken = None,
        job_ids: Sequence[str] | None = None,
        stranded: list[Handle] | None = None,
    ) -> SubmitRun[Handle]:
        """found: the answers of the shared cache, by the place of the item. untaken, stranded: see SubmitRun. job_ids:
        see JobBuilder.build_many."""
        timeout_s = checked_timeout(timeout_s, "timeout_s")
        deadline = inf if timeout_s is None else time.monotonic() + timeout_s
        reply = self._reader.address(spec.name)
        jobs = self._builder.build_many(
            spec, items, options, reply=reply, first_index=first_index, refused=refused, job_ids=job_ids
        )
        index_of = ItemIndex(first_index, refused or ())
        answered: dict[int, Handle] = {}
        if found:
            for position in range(len(jobs)):
                if (answer := found.get(index_of(position) - first_index)) is not None:
                    answered[position] = self._ended(answer)
        return SubmitRun(
            *(spec.name, jobs, self._track, self._known),
            index_of=index_of,
            deadline=deadline,
            answered=answered,
            untaken=untaken,
            stranded=stranded,
        )

    def _ended(self, answer: CachedAnswer) -> Handle:
        """The handle of a job that the shared cache has answered."""
        return self._handle(answer.ended_job(self._policy))

    def _map_run(self, spec: ModelSpec, options: SubmitOptions, order: MapOrder) -> MapRun[Handle]:
        return MapRun(RowShape(spec, options.outputs), order)


def _with_sampling(inputs: Inputs, options: SamplingOptions) -> Inputs:
    if options is None:
        return inputs
    # For the first text: most programs generate none.
    from penstock.registry.generation_inputs import with_options

    found: Inputs = with_options(inputs, options)
    return found


def _several(prompts: object) -> Sequence[Any]:
    """One prompt, or several: a list of integers is one."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise InvalidInput(f"prompts: found {described(prompts)}, expected a prompt or a list of prompts")
    return [prompts] if prompts and isinstance(prompts[0], int) else prompts


def _client_settings(
    settings: Settings | None, *, tenant: str | None, signing_keys: str | None, models_root: str | Path | None
) -> Settings:
    """The given settings, or those of the environment. The caller's own arguments win."""
    root = None if models_root is None else Path(models_root)
    named = {"tenant_id": tenant, "signing_keys": signing_keys, "repo_root": root}
    if settings is None:
        return _loaded_settings(named)
    return settings.changed({key: value for key, value in named.items() if value is not None})


def _cached_answers(settings: Settings) -> CachedAnswers | None:
    if not settings.inference.cache.producer_lookup:
        return None
    # Few clients look into the shared cache.
    from penstock.producers.cached_answers import CachedAnswers

    return CachedAnswers.of(settings)


def _publish_spans(settings: Settings, *, awaits: bool) -> PublishSpans | None:
    if not settings.inference.open_telemetry.traces:
        return None
    # Few programs have OpenTelemetry.
    from penstock.registry.open_telemetry import tracer_of

    tracer = tracer_of()
    # It imports the package, of whose absence `tracer_of` tells.
    from penstock.producers.publish_spans import AsyncPublishSpans, PublishSpans

    return AsyncPublishSpans(tracer) if awaits else PublishSpans(tracer)


def _loaded_settings(overrides: Mapping[str, object] | None = None) -> Settings:
    # For the first client: pydantic costs a third of `from penstock import Client`.
    from penstock.registry.settings import Settings

    return Settings.load(overrides=overrides)


def _leave_parent() -> None:
    for client in list(_clients):
        if not client._is_closed:
            client._leave_parent()


_clients: weakref.WeakSet[ClientCore[Any, Any, Any, Any, Any]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_leave_parent)
