"""The parts of model.yaml: where weights lie, how jobs are batched, which codec answers, what differs by endpoint.

    model.yaml -> ModelSpec (registry/package/spec.py), of which each section is a field

Pure values: nothing is looked up on the disk here.
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
    "Device",
    "InsidePath",
    "MAX_CONCURRENCY",
    "EndpointPolicy",
    "Policy",
    "Precision",
    "Section",
    "Source",
]

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda"]

_REFUSED: Final = {
    "trust_remote_code": "expected none: code that comes with weights is never run",
    "auto_shard_model": "expected none: a model is served by one device and is not sharded",
    "sharding": "expected none: a model is served by one device and is not sharded",
    "sharding_axis_dims": "expected none: a model is served by one device and is not sharded",
}
"""Fields that other servers have and that are refused with the reason."""


def _inside(path: str) -> str:
    """A relative path that stays inside the folder it is relative to; the folder itself is `.`."""
    parts = PurePosixPath(path).parts
    if not path or path.startswith("/") or ".." in parts or "\\" in path or not path.isprintable():
        raise ValueError(f"found {path!r:.80}, expected a relative path inside the package")
    return path


_MAX_ROWS: Final = 65_536
_MAX_LENGTH: Final = MAX_BYTES
"""No text or axis of a job is longer than the job."""
MAX_CONCURRENCY: Final = 64
"""Each forward at the same time is a thread."""
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
    """Where the weights of a `transformers` package lie: in it, in an installed package, or in the hub's cache."""

    path: InsidePath = "."
    """Folder, relative to the package, to the installed package or to the hub's snapshot."""
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
    """How jobs of this model share a forward. 0 and null mean: use the setting, or no bound."""

    max_batch_size: Annotated[int, Field(ge=0, le=_MAX_ROWS)] = 0
    """Rows; 0: the worker's setting."""
    max_wait_ms: Annotated[float | None, Field(ge=0, le=_MAX_WAIT_MS)] = None
    """How long a job may wait for company."""
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    """Rows times the longest length in the batch."""
    max_bytes: Annotated[int | None, Field(ge=1)] = None
    """Bytes of the inputs of one batch."""
    sort_window: Annotated[int, Field(ge=1, le=_MAX_SORT_WINDOW)] = 1
    """How many batches of waiting jobs are sorted by length before one is cut."""
    length_input: str | None = None
    """The input whose length decides: characters of text, or the extent of a tensor's first symbolic axis."""
    max_length: Annotated[int | None, Field(ge=1, le=_MAX_LENGTH)] = None
    """The longest `length_input`; for `transformers` in tokens, otherwise as `length_input` is measured."""
    truncate: bool = False
    """Whether longer text is cut instead of refused; only `transformers` can."""
    buckets: Annotated[
        tuple[Annotated[int, Field(ge=1, le=_MAX_LENGTH)], ...],
        Field(strict=False, max_length=32),
        AfterValidator(_ascending),
    ] = ()
    """Numbers of tokens that an encoder's rows are padded to, ascending, so that it is run in few shapes; rows longer
    than the last one are padded to the longest that the model reads. Empty: to the longest row beside them."""


class Codecs(Section):
    """How tensors are written where the caller does not say."""

    default: Literal["json", "base64"] = "json"
    """`json`: nested lists; `base64`: little-endian bytes."""


class EndpointPolicy(Section):
    """What may differ by endpoint. null: as the policy's default says, then the model, then the setting."""

    window_ms: Annotated[float | None, Field(ge=0, le=_MAX_WAIT_MS)] = None
    """How long a job may wait for company."""
    precision: Precision | None = None
    """The number format of a forward."""
    concurrency: Annotated[int | None, Field(ge=1, le=MAX_CONCURRENCY)] = None
    """Forwards of the endpoint that may run at the same time in one worker."""
    cache_ttl_s: Annotated[float | None, Field(ge=0)] = None
    """Lifetime of a cached answer; 0: none is kept."""
    fallback_runtime: Literal["none", "reference"] | None = None
    """Who answers when the form in use fails: nobody, or the model as its author built it."""
    rollout_percent: Annotated[float | None, Field(ge=0, le=100)] = None
    """The share of requests that a candidate version may answer."""

    def over(self, other: EndpointPolicy) -> EndpointPolicy:
        """These knobs, and where they say nothing those of `other`."""
        return other.model_copy(update=self.model_dump(exclude_none=True))


class Policy(Section):
    """The knobs of a model and of its endpoints."""

    default: EndpointPolicy = EndpointPolicy()
    """For every endpoint."""
    endpoints: dict[str, EndpointPolicy] = {}
    """By the endpoint's name. Jobs ask for `infer`; the knobs of other endpoints have no effect."""

    @model_validator(mode="after")
    def _names_are_valid(self) -> Policy:
        for name in self.endpoints:
            try:
                parse_name("endpoint", name)
            except InvalidInput as error:
                raise ValueError(f"endpoints: {error}") from None
        return self

    def of(self, endpoint: str) -> EndpointPolicy:
        """The knobs of an endpoint, the default's where it says nothing."""
        return self.endpoints.get(endpoint, EndpointPolicy()).over(self.default)
