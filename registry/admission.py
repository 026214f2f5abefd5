"""A caller's inputs -> a sealed publication, or a Rejected error before anything is written. No connection here.

    inputs -> signature (names, dtypes, shapes, ranges) -> bytes (cap) -> header -> seal -> Publication

Every door admits jobs through this: the clients, and the lane of tasks that come through Celery. The idempotency
fingerprint covers model, version and inputs; deadline and priority may differ between two attempts at the same
request.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from penstock.registry.broker.base import Limits, Publication
from penstock.registry.envelope import JobHeader, Keyring, Options, Retry, seal
from penstock.registry.errors import DeadlineExceeded, InvalidInput, UnknownModel, described
from penstock.registry.package import ModelSpec, find, load_package
from penstock.registry.queues import new_job_id, parse_name, parse_priority
from penstock.registry.settings import QueueConfig, Settings
from penstock.registry.tensors import encode, encoded_size

__all__ = ["JobBuilder", "SpecCache", "limits_of"]

_TRACEPARENT: Final = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
_MAX_DEADLINE_S: Final = 366 * 86_400
_KEEP_SPEC_S: Final = 1.0
_MOST_SPECS: Final = 10_000
_PLAIN: Final = Options()
_MAX_ATTEMPTS: Final = 100
_MAX_PAUSE_S: Final = 3600


def limits_of(queue: QueueConfig) -> Limits:
    """Admission as the settings have it."""
    return Limits(queue.max_depth, queue.tenant_max_in_flight, int(queue.job_ttl_s * 1000))


class SpecCache:
    """Specs as the broker has them, believed for a second; without one, the package under the models root.

    A version that a caller names has a spec of its own.
    """

    def __init__(self, models_root: Path) -> None:
        self._root = models_root
        self._specs: dict[tuple[str, str], tuple[float, bytes | None, ModelSpec]] = {}
        """By model and version; an empty version is the one that answers."""

    def fresh(self, model: str, version: str = "") -> ModelSpec | None:
        """The spec if it was asked for a moment ago; None: ask the broker, then `store`.

        Raises InvalidInput for a name that no model can have.
        """
        # Through the lane, anything may stand where a name is expected.
        kept = self._specs.get((model, version)) if isinstance(model, str) and isinstance(version, str) else None
        if kept is not None and kept[0] > time.monotonic():
            return kept[2]
        parse_name("model", model)
        if version:
            parse_name("version", version)
        return None

    def store(self, model: str, found: bytes | None, version: str = "") -> ModelSpec:
        """Takes in the broker's answer. Raises UnknownModel when there is no local package either."""
        kept = self._specs.get((model, version))
        if kept is not None and kept[1] == found:
            spec = kept[2]
        elif found is not None:
            spec = ModelSpec.from_json(found)
        else:
            spec = self._local(model, version)
        if len(self._specs) >= _MOST_SPECS:
            self._specs.clear()
        self._specs[model, version] = (time.monotonic() + _KEEP_SPEC_S, found, spec)
        return spec

    def _local(self, model: str, version: str) -> ModelSpec:
        try:
            return load_package(find(self._root, model, version or None).path, trusted_roots=(self._root,)).spec
        except UnknownModel:
            reference = f"{model}/{version}" if version else model
            if answering := self._specs.get((model, "")):
                raise UnknownModel(
                    f"Unknown model {reference!r:.80}. Expected version: {answering[2].version}"
                ) from None
            raise UnknownModel(
                f"Unknown model {reference!r}. Expected one that a worker serves or that `penstock models register` "
                "has announced"
            ) from None


class JobBuilder:
    """Turns requests into publications: everything about a client that its jobs have in common."""

    def __init__(self, *, tenant: str, keyring: Keyring, max_bytes: int) -> None:
        self.tenant = parse_name("tenant", tenant)
        self.keyring = keyring
        self._max_bytes = max_bytes

    @classmethod
    def of(cls, settings: Settings) -> JobBuilder:
        """The press of a process with these settings."""
        max_bytes = settings.inference.max_request_size_mb * 1024 * 1024
        return cls(tenant=settings.tenant_id, keyring=settings.keyring, max_bytes=max_bytes)

    def publication(
        self,
        spec: ModelSpec,
        inputs: Mapping[str, object],
        *,
        priority: str = "normal",
        deadline_s: float | None = None,
        idempotency_key: str | None = None,
        tenant: str | None = None,
        version: str | None = None,
        outputs: Sequence[str] = (),
        traceparent: str = "",
        reply: str = "",
        job_id: str = "",
        lane: bool = False,
        retry: Retry | None = None,
    ) -> Publication:
        """One sealed job. Raises InvalidInput, DeadlineExceeded or UnknownModel, naming what was expected."""
        band = parse_priority(priority)
        owner = self.tenant if tenant is None or tenant == self.tenant else parse_name("tenant", tenant)
        if version and version != spec.version:
            raise UnknownModel(f"Unknown model {spec.name}/{described(version)}. Expected version: {spec.version}")
        if traceparent and not (isinstance(traceparent, str) and _TRACEPARENT.fullmatch(traceparent)):
            raise InvalidInput("Bad traceparent. Expected the W3C form 00-<32 hex>-<16 hex>-<2 hex>")
        if not isinstance(inputs, Mapping):
            raise InvalidInput(f"Inputs are a {type(inputs).__name__}. Expected a mapping from input name to value")
        arrays = spec.signature.check(inputs)
        if (size := encoded_size(arrays)) > self._max_bytes:
            raise self._too_large(size)
        content, body = encode(arrays)
        if len(body) > self._max_bytes:
            raise self._too_large(len(body))
        digest = fingerprint = ""
        if idempotency_key is not None:
            digest = _idempotency_digest(owner, idempotency_key)
            fingerprint = _fingerprint(version or "", repr(content).encode(), body)
        header = JobHeader(
            id=job_id or new_job_id(spec.name),
            tenant=owner,
            model=spec.name,
            priority=priority,
            content=content,
            version=version or "",
            deadline_ms=0 if deadline_s is None else _deadline_ms(deadline_s),
            reply=reply,
            idempotency_digest=digest,
            traceparent=traceparent,
            options=_options(spec, outputs, lane, retry) if outputs or lane or retry else _PLAIN,
            key=self.keyring.signing_id,
        )
        sealed = seal("job", header, body, self.keyring)
        return Publication(header.id, band, sealed, owner, reply, digest, fingerprint)

    def _too_large(self, size: int) -> InvalidInput:
        return InvalidInput(f"The inputs take {size} bytes. Expected at most {self._max_bytes}")


def _options(spec: ModelSpec, outputs: Sequence[str], lane: bool, retry: Retry | None) -> Options:
    wanted = spec.signature.select_outputs(outputs) if outputs else ()
    if retry is not None:
        _check_retry(spec, retry)
    return Options(wanted, lane, retry)


def _check_retry(spec: ModelSpec, retry: object) -> None:
    if not isinstance(retry, Retry):
        raise InvalidInput(f"retry is a {type(retry).__name__}. Expected a Retry(attempts, backoff_s, longest_s)")
    # Nothing but the very types: True and 3.0 would pass for numbers here and make a header that no worker can read.
    if type(retry.attempts) is not int or not 1 <= retry.attempts <= _MAX_ATTEMPTS:
        raise InvalidInput(
            f"retry.attempts is {retry.attempts!r:.40}. Expected a whole number from 1 to {_MAX_ATTEMPTS}"
        )
    pauses = (retry.backoff_s, retry.longest_s)
    if any(type(pause) not in (int, float) for pause in pauses) or not 0 <= pauses[0] <= pauses[1] <= _MAX_PAUSE_S:
        raise InvalidInput(
            f"retry pauses are {pauses[0]!r:.40} to {pauses[1]!r:.40} s. Expected plain numbers, "
            f"backoff_s <= longest_s, both from 0 to {_MAX_PAUSE_S}"
        )
    if spec.streams:
        raise InvalidInput(f"{spec.name} streams, and what its subscribers have seen stands. Expected no retry")


def _deadline_ms(deadline_s: float) -> int:
    if not isinstance(deadline_s, int | float) or isinstance(deadline_s, bool):
        raise InvalidInput(f"deadline_s is a {type(deadline_s).__name__}. Expected seconds from now")
    if isinstance(deadline_s, int):
        # No float holds any integer, and the errors show one.
        deadline_s = max(-(10**18), min(deadline_s, 10**18))
    if not deadline_s > 0:
        raise DeadlineExceeded(f"deadline_s is {deadline_s:g}. Expected a positive number of seconds from now")
    if deadline_s > _MAX_DEADLINE_S:
        raise InvalidInput(f"deadline_s is {deadline_s:g}. Expected at most {_MAX_DEADLINE_S}")
    return max(1, round(deadline_s * 1000))


def _idempotency_digest(tenant: str, key: str) -> str:
    if not isinstance(key, str) or not 0 < len(key) <= 255:
        raise InvalidInput("Bad idempotency key. Expected a string of 1 to 255 characters")
    digest = hashlib.blake2b(digest_size=16)
    # Names hold no NUL, so the pair is unambiguous.
    digest.update(tenant.encode() + b"\0" + key.encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _fingerprint(version: str, described: bytes, body: bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in (version.encode(), described):
        digest.update(len(part).to_bytes(4, "little") + part)
    digest.update(body)
    return digest.hexdigest()
