"""A caller's inputs -> a sealed publication, or a Rejected error before anything is written. No connection here.

    inputs -> signature (names, dtypes, shapes, ranges) -> bytes (cap) -> header -> seal -> Publication
           -> conversion, where it refuses another dtype -> signature

Every endpoint admits jobs through this module: both clients, and the endpoint for Celery tasks. The idempotency
fingerprint covers model, version and inputs. Deadline and priority may differ between two attempts at one request.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import product, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec
from msgspec.structs import replace

from penstock.registry.broker.base import Limits, Publication
from penstock.registry.envelope import TRACEPARENT, JobHeader, Keyring, Options, Retry, seal
from penstock.registry.errors import BadModelName, DeadlineExceeded, InvalidInput, UnknownModel, described
from penstock.registry.idempotency import KeyDigests, checked_key, fingerprint_state
from penstock.registry.job_template import JobTemplate
from penstock.registry.queues import (
    DEFAULT_ENDPOINT,
    PriorityName,
    job_time_ms,
    new_job_id,
    parse_name,
    parse_priority,
)
from penstock.registry.tensors import Array, Tensor, encode, encoded_size

if TYPE_CHECKING:
    from penstock.registry.package import ModelSpec
    from penstock.registry.settings import Settings
    from penstock.registry.settings_sections import QueueConfig

logger = logging.getLogger("penstock.client")

__all__ = ["JobBuilder", "SpecCache", "SubmitOptions", "limits_of"]

_MAX_STICKY_KEY: Final = 128
_MAX_DEADLINE_S: Final = 366 * 86_400
_KEEP_SPEC_S: Final = 1.0
_MOST_SPECS: Final = 10_000
_NO_OPTIONS: Final = Options()
_MOST_TEMPLATES: Final = 64
_NONE: Final = type(None)
_PLAIN_TYPES: Final = frozenset(product((str,), (int, float, _NONE), (str, _NONE), (str, _NONE)))
"""The types that priority, deadline, tenant and version of a kept template may have."""


def limits_of(queue: QueueConfig) -> Limits:
    """The admission limits of the settings."""
    return Limits(queue.max_depth, queue.tenant_max_in_flight, int(queue.job_ttl_s * 1000))


class SubmitOptions(msgspec.Struct, frozen=True, gc=False):
    """What a producer may say of a job beside its inputs. One set serves `submit`, `submit_many` and `map`.

    deadline_s: seconds from acceptance. None means no deadline.
    tenant, version: None means the client's tenant and the active version.
    outputs: the names of the requested outputs. Empty means all.
    retry: None means that the first failure of a forward ends the job.
    webhook: the URL that is told of the job's end. None means none.
    sticky_key: names the user or the session, so that a sticky experiment answers all its jobs with one version. None
    means the tenant.
    endpoint: one of the model's endpoints, whose policy the job has. None means `infer`.
    account: the id of the API key that pays for the job. The gateway says so; empty: none.
    prompt_tokens: of the inputs of each job of the call, for the usage of `account`. Empty: the gateway counted none.
    """

    priority: PriorityName = "normal"
    deadline_s: float | None = None
    tenant: str | None = None
    version: str | None = None
    outputs: Sequence[str] = ()
    traceparent: str = ""
    retry: Retry | None = None
    webhook: str | None = None
    sticky_key: str | None = None
    endpoint: str | None = None
    account: str = ""
    prompt_tokens: Sequence[int] = ()


_DEFAULTS: Final = SubmitOptions()


class SpecCache:
    """The model specs of the broker, each kept for one second. Without one, the package under the models root serves.

    A named version has a spec of its own.
    """

    def __init__(self, models_root: Path) -> None:
        self._root = models_root
        self._specs: dict[tuple[str, str], tuple[float, bytes | None, ModelSpec]] = {}
        """By model and version. An empty version is the active one."""

    def get(self, model: str, version: str | None, fetch: Callable[[str, str], bytes | None]) -> ModelSpec:
        """The spec of the active version, or of the named one. `fetch` asks the broker when the cache cannot tell.

        Raises BadModelName for a name that no model can have, and UnknownModel.
        """
        spec = self.fresh(model) or self.store(model, fetch(model, ""))
        if not version or version == spec.version:
            return spec
        return self.fresh(model, version) or self.store(model, fetch(model, version), version)

    async def get_async(
        self, model: str, version: str | None, fetch: Callable[[str, str], Awaitable[bytes | None]]
    ) -> ModelSpec:
        """The same as `get`, for a `fetch` that is awaited."""
        spec = self.fresh(model) or self.store(model, await fetch(model, ""))
        if not version or version == spec.version:
            return spec
        return self.fresh(model, version) or self.store(model, await fetch(model, version), version)

    def fresh(self, model: str, version: str = "") -> ModelSpec | None:
        """The spec if it is less than a second old. None means: ask the broker, then call `store`.

        Raises BadModelName for a name that no model can have.
        """
        # A Celery task may bring any value in place of a name.
        kept = self._specs.get((model, version)) if isinstance(model, str) and isinstance(version, str) else None
        if kept is not None and kept[0] > time.monotonic():
            return kept[2]
        try:
            parse_name("model", model)
            if version:
                parse_name("version", version)
        except InvalidInput as error:
            raise BadModelName(str(error)) from None
        return None

    def store(self, model: str, found: bytes | None, version: str = "") -> ModelSpec:
        """Keeps the broker's answer. Raises UnknownModel when there is no local package either."""
        kept = self._specs.get((model, version))
        if kept is not None and kept[1] == found:
            spec = kept[2]
        elif found is not None:
            spec = _parsed_spec(found)
        else:
            spec = self._local(model, version)
        if len(self._specs) >= _MOST_SPECS:
            self._specs.clear()
        self._specs[model, version] = (time.monotonic() + _KEEP_SPEC_S, found, spec)
        return spec

    def _local(self, model: str, version: str) -> ModelSpec:
        from penstock.registry.package import find, load_package

        try:
            return load_package(find(self._root, model, version or None).path, trusted_roots=(self._root,)).spec
        except UnknownModel:
            reference = f"{model}/{version}" if version else model
            if active := self._specs.get((model, "")):
                raise UnknownModel(f"Unknown model {reference!r:.80}. Expected version: {active[2].version}") from None
            raise UnknownModel(
                f"Unknown model {reference!r}. Expected one that a worker serves or that `penstock models register` "
                "has announced"
            ) from None


class JobBuilder:
    """Turns requests into publications. It holds the part that all jobs of a process have in common."""

    def __init__(self, *, tenant: str, keyring: Keyring, max_bytes: int) -> None:
        self.tenant = parse_name("tenant", tenant)
        self.keyring = keyring
        self._max_bytes = max_bytes
        self._told: set[tuple[str, str]] = set()
        """The converted inputs, by model, that the log has named."""
        self._templates: dict[tuple[object, ...], JobTemplate] = {}
        self._last: tuple[ModelSpec, SubmitOptions, str, JobTemplate] | None = None
        """What the last call of `build` with common options has found; see `_same_template`."""

    @classmethod
    def of(cls, settings: Settings, keyring: Keyring) -> JobBuilder:
        """The builder of a process with these settings and keys."""
        max_bytes = settings.inference.max_request_size_mb * 1024 * 1024
        return cls(tenant=settings.tenant_id, keyring=keyring, max_bytes=max_bytes)

    def build(
        self,
        spec: ModelSpec,
        inputs: Mapping[str, object],
        options: SubmitOptions = _DEFAULTS,
        *,
        idempotency_key: str | None = None,
        reply: str = "",
        job_id: str = "",
        lane: bool = False,
    ) -> Publication:
        """One sealed job. Raises InvalidInput, DeadlineExceeded or UnknownModel; the text says what was expected.

        lane: the job came as a Celery task. Its result is also stored in Celery's result backend.
        """
        template = None if lane else self._same_template(spec, options, reply)
        if template is None:
            template = self._template(spec, options, reply, lane=lane, is_for_one=True)
        job = None if job_id else template.build(inputs, idempotency_key, options.account)
        job = job or self._built(template, inputs, idempotency_key, options.account, job_id)
        return replace(job, prompt_tokens=options.prompt_tokens[0]) if options.prompt_tokens else job

    def encoded(self, spec: ModelSpec, inputs: Mapping[str, object], options: SubmitOptions) -> tuple[JobHeader, bytes]:
        """(header, body) of a job as a worker will read them, but for its id and its idempotency key. Raises as
        `build` does."""
        content, body = self._encoded(spec, inputs)
        return replace(self._template(spec, options, "").header, content=content), body

    def build_many(
        self,
        spec: ModelSpec,
        items: Iterable[tuple[Mapping[str, object] | InvalidInput, str | None]],
        options: SubmitOptions = _DEFAULTS,
        *,
        reply: str = "",
        first_index: int = 0,
        refused: dict[int, InvalidInput] | None = None,
        job_ids: Sequence[str] | None = None,
    ) -> list[Publication]:
        """One sealed job for each pair of inputs and idempotency key. The options are checked once.

        Raises as `build` does. An error in one item names its index, which counts from `first_index`.
        items: an InvalidInput in the place of inputs is the error of its item.
        refused: takes the errors by index, in place of raising them. Their items are left out.
        job_ids: the id of each item's job, from DerivedIds. None: new ones.
        """
        template = self._template(spec, options, reply)
        publications: list[Publication] = []
        ids = repeat("") if job_ids is None else job_ids
        for index, ((inputs, key), job_id) in enumerate(zip(items, ids, strict=job_ids is not None), first_index):
            job = template.build(inputs, key, options.account, job_id)
            if job is None:
                try:
                    job = self._built(template, inputs, key, options.account, job_id)
                except InvalidInput as error:
                    refusal = InvalidInput(f"Item {index}: {error}")
                    if refused is None:
                        raise refusal from None
                    refused[index] = refusal
                    continue
            if options.prompt_tokens:
                job = replace(job, prompt_tokens=options.prompt_tokens[index - first_index])
            publications.append(job)
        return publications

    def _same_template(self, spec: ModelSpec, options: SubmitOptions, reply: str) -> JobTemplate | None:
        """The template of the last call, if this one has the very same arguments. No other object counts as the same:
        see `_template`."""
        if self._last is None:
            return None
        last_spec, last, last_reply, template = self._last
        is_same = (
            spec is last_spec
            and reply is last_reply
            and options.priority is last.priority
            and options.deadline_s is last.deadline_s
            and options.tenant is last.tenant
            and options.version is last.version
            and not (options.outputs or options.traceparent)
            and not _has_rare_options(options)
        )
        return template if is_same else None

    def _template(
        self, spec: ModelSpec, options: SubmitOptions, reply: str, *, lane: bool = False, is_for_one: bool = False
    ) -> JobTemplate:
        """The template of a call's jobs, from checked options. That of common options is kept for later calls.

        is_for_one: the call has one job.
        """
        key: tuple[object, ...] | None = None
        priority, deadline_s, tenant, version = options.priority, options.deadline_s, options.tenant, options.version
        is_uncommon = lane or options.outputs or options.traceparent or _has_rare_options(options)
        # The exact types: True is equal to 1, and must not find what 1 has left.
        if not is_uncommon and (type(priority), type(deadline_s), type(tenant), type(version)) in _PLAIN_TYPES:
            key = (id(spec), priority, deadline_s, tenant, version, reply)
            kept = self._templates.get(key)
            if kept is not None:
                self._last = spec, options, reply, kept
                return kept
        band = parse_priority(priority)
        is_used_again = key is not None or not is_for_one
        header = self._header(spec, options, reply, lane=lane)
        template = JobTemplate(spec, header, band, self.keyring, knows_shapes=is_used_again)
        if key is not None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            # The template refers to its spec, so that no other spec gets the identity in the key.
            self._templates[key] = template
        return template

    def _header(self, spec: ModelSpec, options: SubmitOptions, reply: str, *, lane: bool = False) -> JobHeader:
        """The header of a call's jobs, from checked options. Each job adds its id, inputs and idempotency key."""
        tenant, version, traceparent = options.tenant, options.version, options.traceparent
        if version and version != spec.version:
            raise UnknownModel(f"Unknown model {spec.name}/{described(version)}. Expected version: {spec.version}")
        if traceparent and not (isinstance(traceparent, str) and TRACEPARENT.fullmatch(traceparent)):
            raise InvalidInput("Bad traceparent. Expected the W3C form 00-<32 hex>-<16 hex>-<2 hex>")
        has_options = options.outputs or lane or _has_rare_options(options)
        return JobHeader(
            id="",
            tenant=self.tenant if tenant is None or tenant == self.tenant else parse_name("tenant", tenant),
            model=spec.name,
            priority=options.priority,
            content=(),
            version=version or "",
            deadline_ms=0 if options.deadline_s is None else _deadline_ms(options.deadline_s),
            reply=reply,
            traceparent=traceparent,
            options=_header_options(spec, options, lane) if has_options else _NO_OPTIONS,
            key=self.keyring.signing_id,
            is_sealed=self.keyring.seals,
        )

    def _built(
        self,
        template: JobTemplate,
        inputs: Mapping[str, object] | InvalidInput,
        key: str | None,
        account: str,
        job_id: str = "",
    ) -> Publication:
        """One job, with every check. The template learns its shape."""
        spec, shared = template.spec, template.header
        content, body = self._encoded(spec, inputs)
        digest = fingerprint = ""
        if key is not None:
            digest, state = KeyDigests(shared.tenant).of(checked_key(key)), fingerprint_state(shared.version, content)
            state.update(body)
            fingerprint = state.hexdigest()
        header = replace(
            shared,
            id=job_id or new_job_id(spec.name),
            content=content,
            idempotency_digest=digest,
            account=account if spec.generate is not None else "",
        )
        sealed = seal("job", header, body, self.keyring)
        # The ids of a template have one length: that of a UUID. A Celery task may have any.
        if not job_id or job_time_ms(job_id) is not None:
            template.learn(header, sealed, len(body))
        target = self._target(shared.options.webhook, header.id) if shared.options.webhook else ""
        return Publication(
            header.id,
            template.priority,
            sealed,
            header.tenant,
            header.reply,
            digest,
            fingerprint,
            shared.deadline_ms,
            target,
            account,
        )

    def _target(self, url: str, job_id: str) -> str:
        from penstock.registry.webhook_target import sealed_target

        return sealed_target(url, job_id, self.keyring)

    def _encoded(
        self, spec: ModelSpec, inputs: Mapping[str, object] | InvalidInput
    ) -> tuple[tuple[Tensor, ...], bytes]:
        """The inputs as bytes, checked against the model's signature and the size limit."""
        # `dict` first: a check against an abstract class takes longer.
        if not isinstance(inputs, (dict, Mapping)):
            if isinstance(inputs, InvalidInput):
                raise inputs
            raise InvalidInput(f"Inputs are a {type(inputs).__name__}. Expected a mapping from input name to value")
        if spec.generate is not None:
            from penstock.registry.generation_inputs import checked

            inputs = checked(spec, inputs)
        try:
            arrays = spec.signature.check(inputs)
        except InvalidInput as refusal:
            arrays = self._converted(spec, inputs, refusal)
        if (size := encoded_size(arrays)) > self._max_bytes:
            raise self._too_large(size)
        content, body = encode(arrays)
        if len(body) > self._max_bytes:
            raise self._too_large(len(body))
        return content, body

    def _converted(self, spec: ModelSpec, inputs: Mapping[str, object], refusal: InvalidInput) -> dict[str, Array]:
        """The inputs with those of another dtype converted. Raises `refusal` when there is nothing to convert."""
        from penstock.registry.package.conversion import conversions

        changed = conversions(spec.inputs, inputs)
        if not changed:
            raise refusal
        try:
            arrays = spec.signature.check({**inputs, **changed})
        except InvalidInput as error:
            raise error from None
        if logger.isEnabledFor(logging.DEBUG):
            self._tell(spec.name, changed)
        return arrays

    def _tell(self, model: str, changed: Iterable[str]) -> None:
        """One line for each converted input of a model, at its first job."""
        for name in changed:
            if (model, name) not in self._told:
                self._told.add((model, name))
                logger.debug("input converted to the declared dtype", extra={"model": model, "input": name})

    def _too_large(self, size: int) -> InvalidInput:
        return InvalidInput(f"The inputs take {size} bytes. Expected at most {self._max_bytes}")


def _parsed_spec(found: bytes) -> ModelSpec:
    # At the first job: a process that imports a client need not submit.
    from penstock.registry.package import ModelSpec

    return ModelSpec.from_json(found)


def _has_rare_options(options: SubmitOptions) -> bool:
    return (
        bool(options.retry)
        or options.webhook is not None
        or options.sticky_key is not None
        or options.endpoint is not None
    )


def _header_options(spec: ModelSpec, options: SubmitOptions, lane: bool) -> Options:
    wanted = spec.signature.select_outputs(options.outputs) if options.outputs else ()
    if options.retry is not None:
        _check_retry(spec, options.retry)
    webhook, sticky_key = _webhook_url(options.webhook), _sticky_key(options.sticky_key)
    return Options(wanted, lane, options.retry, webhook, sticky_key, _endpoint(spec, options.endpoint))


def _sticky_key(key: object) -> str:
    if key is None:
        return ""
    if not isinstance(key, str) or not 0 < len(key) <= _MAX_STICKY_KEY or not key.isprintable():
        raise InvalidInput(f"Bad sticky_key. Expected 1 to {_MAX_STICKY_KEY} printable characters, or None")
    return key


def _endpoint(spec: ModelSpec, name: object) -> str:
    """The endpoint as a header has it. Raises InvalidInput for one that the model does not have."""
    if name is None or name == DEFAULT_ENDPOINT:
        return ""
    if not isinstance(name, str) or name not in spec.endpoints:
        raise InvalidInput(
            f"Unknown endpoint {described(name)} of {spec.name}. Expected one of: {', '.join(spec.endpoints)}"
        )
    return name


def _webhook_url(url: str | None) -> str:
    if url is None:
        return ""
    # Here: few jobs have one, and parsing URLs is not among what `import penstock` needs.
    from penstock.registry.webhook_target import checked_url

    return checked_url(url)


def _check_retry(spec: ModelSpec, retry: object) -> None:
    if not isinstance(retry, Retry):
        raise InvalidInput(f"retry is a {type(retry).__name__}. Expected a Retry(attempts, backoff_s, longest_s)")
    if spec.streams:
        raise InvalidInput(f"{spec.name} streams, and a retry cannot take back its events. Expected no retry")


def _deadline_ms(deadline_s: float) -> int:
    if not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool):
        raise InvalidInput(f"deadline_s is a {type(deadline_s).__name__}. Expected seconds from now")
    if isinstance(deadline_s, int):
        # An int may be too large for a float, and the messages format a float.
        deadline_s = max(-(10**18), min(deadline_s, 10**18))
    if not deadline_s > 0:
        raise DeadlineExceeded(f"deadline_s is {deadline_s:g}. Expected a positive number of seconds from now")
    if deadline_s > _MAX_DEADLINE_S:
        raise InvalidInput(f"deadline_s is {deadline_s:g}. Expected at most {_MAX_DEADLINE_S}")
    return max(1, round(deadline_s * 1000))
