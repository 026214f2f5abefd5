"""The sections of model.yaml: the source of weights, batching, codecs, policies of endpoints.

    model.yaml -> ModelSpec (registry/package/spec.py); each section is one of its fields

Pure values: no file is read here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import PurePosixPath
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from penstock.registry.errors import InvalidInput
from penstock.registry.package.hub_cache import check_hub, check_revision
from penstock.registry.queues import parse_name
from penstock.registry.tensors import MAX_BYTES

__all__ = [
    "Batching",
    "Codecs",
    "DeviceChoice",
    "InsidePath",
    "MAX_CONCURRENCY",
    "MAX_ENDPOINTS",
    "EndpointPolicy",
    "Policy",
    "Precision",
    "Section",
    "Source",
]

Precision = Literal["auto", "fp32", "bf16", "fp16"]
DeviceChoice = Literal["auto", "cpu", "cuda"]

_REFUSED: Final = {
    "trust_remote_code": "expected none: code that comes with weights is never run",
    "auto_shard_model": "expected none: a model is served by one device and is not sharded",
    "sharding": "expected none: a model is served by one device and is not sharded",
    "sharding_axis_dims": "expected none: a model is served by one device and is not sharded",
}
"""Fields of other servers that are refused, with the reason."""


def _inside(path: str) -> str:
    """Checks that a relative path stays inside its folder. The folder itself is `.`."""
    parts = PurePosixPath(path).parts
    if not path or path.startswith("/") or ".." in parts or "\\" in path or not path.isprintable():
        raise ValueError(f"found {path!r:.80}, expected a relative path inside the package")
    return path


_MAX_ROWS: Final = 65_536
_MAX_LENGTH: Final = MAX_BYTES
"""A text or an axis of a job cannot be longer than the job."""
MAX_CONCURRENCY: Final = 64
"""Each concurrent forward is a thread."""
MAX_ENDPOINTS: Final = 16
"""A worker has a queue for each endpoint that has jobs."""
_MAX_WAIT_MS: Final = 3_600_000
_MAX_SORT_WINDOW: Final = 1_024

InsidePath = Annotated[str, AfterValidator(_inside)]


class Section(BaseModel):
    """A part of model.yaml: immutable, exact types, no unknown keys."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _refuses_by_name(cls, fields: Any) -> Any:
        for name, reason in _REFUSED.items():
            if isinstance(fields, Mapping) and name in fields:
                raise ValueError(f"{name}: found {fields[name]!r:.80}, {reason}")
        return fields


class Source(Section):
    """The weights of a `transformers` package: in the package, in an installed one, or in the hub's cache."""

    path: InsidePath = "."
    """The folder, relative to the package, to the installed package or to the hub's snapshot."""
    package: str | None = None
    """The importable name of an installed Python distribution; None: the model package's own folder."""
    hub: str | None = None
    """`organisation/name` on the Hugging Face hub; read from the local cache only."""
    revision: str | None = None
    """The commit of `hub`, 40 hex digits: branches and tags move."""

    @model_validator(mode="after")
    def _names_one_place(self) -> Source:
        if self.package is not None and not self.package.isidentifier():
            raise ValueError(f"package: found {self.package!r:.80}, expected the name of a top-level Python package")
        if self.hub is None:
            if self.revision is not None:
                raise ValueError("revision: found without hub, expected both or neither")
            return self
        if self.package is not None:
            raise ValueError("hub: found beside package, expected one of them")
        check_hub(self.hub)
        check_revision(self.revision)
        return self


def _ascending(edges: tuple[int, ...]) -> tuple[int, ...]:
    if any(low >= high for low, high in pairwise(edges)):
        raise ValueError(f"found {', '.join(map(str, edges))}, expected ascending lengths")
    return edges


class Batching(Section):
    """How jobs of this model are batched. 0 and null mean: as the setting says, or no limit."""

    max_batch_size: Annotated[int, Field(ge=0, le=_MAX_ROWS)] = 0
    """Rows of a batch; 0: as the worker's setting says."""
    max_wait_ms: Annotated[float | None, Field(ge=0, le=_MAX_WAIT_MS)] = None
    """The longest batching delay of a job."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Limit of rows times the longest length in the batch."""
    max_bytes: Annotated[int | None, Field(ge=1)] = None
    """Limit of the bytes of one batch: its jobs as they came, and the outputs that they are expected to have."""
    sort_window: Annotated[int, Field(ge=1, le=_MAX_SORT_WINDOW)] = 1
    """How many batches of waiting jobs are sorted by length before one is formed."""
    length_input: str | None = None
    """The input whose length counts: characters of text, or the extent of a tensor's first symbolic axis."""
    max_length: Annotated[int | None, Field(ge=1, le=_MAX_LENGTH)] = None
    """The longest `length_input`: tokens for `transformers`, else the unit of `length_input`."""
    truncate: bool = False
    """Whether longer text is truncated instead of refused; `transformers` only."""
    buckets: Annotated[
        tuple[Annotated[int, Field(ge=1, le=_MAX_LENGTH)], ...],
        Field(strict=False, max_length=32),
        AfterValidator(_ascending),
    ] = ()
    """Lengths in tokens, ascending, to which the rows of an encoder are padded, so that it runs in few shapes. Longer
    rows are padded to the longest that the model reads. Empty: rows are padded to the longest row of their forward."""


class Codecs(Section):
    """The default encoding of tensors as JSON."""

    default: Literal["json", "base64"] = "json"
    """`json`: nested lists; `base64`: little-endian bytes."""


class EndpointPolicy(Section):
    """Settings of an endpoint. null: as the policy's default says, else the model, else the setting."""

    window_ms: Annotated[float | None, Field(ge=0, le=_MAX_WAIT_MS)] = None
    """The longest batching delay of a job."""
    precision: Precision | None = None
    """The number format of a forward."""
    concurrency: Annotated[int | None, Field(ge=1, le=MAX_CONCURRENCY)] = None
    """Concurrent forwards of the endpoint in one worker."""
    cache_ttl_s: Annotated[float | None, Field(ge=0)] = None
    """Lifetime of a cached response; 0: responses are not cached."""
    fallback_runtime: Literal["none", "reference"] | None = None
    """When an optimized form fails: `reference` (null) drops it, and the model as its author built it runs the batch.
    `none` fails the jobs; the form's circuit breaker opens after 3 failures within a minute."""
    fallback_version: str | None = None
    """The version that runs a job on which this one has failed in every form. It needs the same inputs and outputs.
    null: such a job fails."""
    rollout_percent: Annotated[float | None, Field(ge=0, le=100)] = None
    """The first step of a rollout of this version, in percent of the jobs; 0: a rollout needs `--steps`. At another
    endpoint than `infer`: the least share of its jobs that the candidate has during a rollout; 0: the rollout's."""

    @model_validator(mode="after")
    def _names_a_version(self) -> EndpointPolicy:
        if self.fallback_version is not None:
            try:
                parse_name("version", self.fallback_version)
            except InvalidInput as error:
                raise ValueError(f"fallback_version: {error}") from None
        return self

    def over(self, other: EndpointPolicy) -> EndpointPolicy:
        """This policy, with the values of `other` for those that are null."""
        own = {name: value for name, value in self if value is not None}
        return other.model_copy(update=own) if own else other


class Policy(Section):
    """The policies of a model's endpoints."""

    default: EndpointPolicy = EndpointPolicy()
    """The policy of every endpoint, unless `endpoints` has another value."""
    endpoints: Annotated[dict[str, EndpointPolicy], Field(max_length=MAX_ENDPOINTS)] = {}
    """Policies by the name of the endpoint. A job names one of these endpoints, or has that of `infer`."""

    @model_validator(mode="after")
    def _names_are_valid(self) -> Policy:
        for name in self.endpoints:
            try:
                parse_name("endpoint", name)
            except InvalidInput as error:
                raise ValueError(f"endpoints: {error}") from None
        return self

    def of(self, endpoint: str) -> EndpointPolicy:
        """The policy of an endpoint, with the default's values for those that are null."""
        own = self.endpoints.get(endpoint)
        return self.default if own is None else own.over(self.default)
