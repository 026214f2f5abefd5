"""What a package, operators and the settings together say about one version at one endpoint.

    model.yaml, the operators' overlay, settings -> VersionPolicy.of -> the version, its queue, its runtime

Decided before anything is loaded, and again when operators change a knob.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import BATCH, TensorSpec
from penstock.registry.package.spec_sections import EndpointPolicy, Precision
from penstock.registry.queues import DEFAULT_ENDPOINT
from penstock.registry.settings_sections import InferenceConfig
from penstock.registry.tensors import DTYPES, STRING
from penstock.safety.fallback import LEVELS, FallbackChain
from penstock.safety.privacy import redactor_of
from penstock.workers.batching.batcher import BatchLimits

__all__ = ["VersionPolicy"]

_CPU_BATCH: Final = 32
"""Rows of a batch if neither the package nor a setting says it: a CPU gains little from more."""
_CPU_OVERHEAD: Final = 128
"""A forward's fixed cost in tokens, measured with MiniLM on one CPU thread; see BatchLimits."""
_SLICED_OVERHEAD: Final = 1 << 20
"""For a runtime that cuts its batches by length itself: first fill them, then look for similar lengths."""
_BATCHING_LEVEL: Final = 2


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """The limits, time-outs and options of one version. The package's own value comes before the setting."""

    limits: BatchLimits
    is_sized_by_memory: bool
    """Whether neither the package nor a setting gives the batch size: on a GPU its memory decides."""
    concurrency: int
    """Forwards that may run at the same time."""
    precision: Precision
    timeout_s: float
    """The longest time that a forward may show no progress."""
    max_crashes: int
    """Processes that may end while a job is on their model."""
    shares_flights: bool
    """Whether equal jobs that are here at the same time share one forward."""
    cache_ttl_s: float
    """For how many seconds an answer is cached; 0: not at all."""
    finite_outputs: tuple[str, ...]
    """Outputs in which NaN and infinity fail their job."""
    result_row_bytes: int
    """Bytes of the outputs of one row, as far as the signature fixes them."""
    target_latency_s: float
    chain: FallbackChain
    """The levels that may answer a job, one after another."""
    fallback_version: str
    """The version that runs a job on which every other level has failed; empty: there is none."""
    withholds_texts: bool
    """Whether of a model's exceptions only class, file and line are told."""
    redact: Callable[[str], str] = field(compare=False)
    """Removes personal data from texts of a model's exceptions."""
    tokenises: bool
    """Whether preparing a batch beside another forward pays."""
    seats: int = 0
    """Jobs that a generation engine runs at a time; 0: the version has none. `concurrency` has room for more urgent
    jobs beyond them."""

    @classmethod
    def of(
        cls,
        spec: ModelSpec,
        config: InferenceConfig,
        name: str = DEFAULT_ENDPOINT,
        overlay: EndpointPolicy | None = None,
    ) -> VersionPolicy:
        """The policy of a package under these settings. Raises ConfigurationError for limits that no batch can keep.

        name: the endpoint. overlay: the knobs that operators have set over those of the package.
        """
        endpoint = spec.policy_for(name)
        if overlay is not None:
            endpoint = overlay.over(endpoint)
        limits = _batch_limits(spec, endpoint.window_ms, config)
        repeats = config.enabled and spec.deterministic
        # Of a stream, the subscribers of an equal job need the chunks: those of a cached text can be made from it.
        has_cache = repeats and (spec.generate is not None or not spec.streams)
        seats = spec.generate.max_num_seqs if spec.generate else 0
        has_size = spec.batching.max_batch_size or config.batching.max_batch_size
        return cls(
            limits=limits,
            is_sized_by_memory=limits.max_rows > 1 and not has_size,
            concurrency=(seats + spec.generate.urgent_seats) if spec.generate else endpoint.concurrency or 1,
            seats=seats,
            precision=endpoint.precision or config.precision,
            timeout_s=float(spec.timeout_s or config.timeout_seconds),
            max_crashes=config.queue.max_crashes,
            shares_flights=repeats and not spec.streams and config.batching.single_flight,
            cache_ttl_s=_cache_ttl_s(spec, endpoint.cache_ttl_s, config) if has_cache else 0.0,
            finite_outputs=tuple(
                output.name for output in spec.outputs if output.dtype.startswith("float") and not output.allow_nan
            ),
            result_row_bytes=sum(map(_row_bytes, spec.outputs)),
            target_latency_s=config.batching.target_latency_ms / 1000,
            chain=_chain(endpoint),
            fallback_version=endpoint.fallback_version or "",
            withholds_texts=config.withholds_texts,
            redact=redactor_of(config.privacy).redact,
            tokenises=spec.format == "transformers",
        )

    @property
    def load_key(self) -> tuple[Precision, bool]:
        """What is decided when a model is loaded: policies that differ in it have models of their own."""
        return self.precision, "compiled" in self.chain.levels

    def under_load_of(self, loaded: VersionPolicy) -> VersionPolicy:
        """This policy, as far as a model that was loaded under another one can keep to it."""
        loads = "compiled" in loaded.chain.levels
        levels = [level for level in LEVELS if (loads if level == "compiled" else level in self.chain.levels)]
        return replace(self, precision=loaded.precision, chain=FallbackChain(tuple(levels)))


def _chain(endpoint: EndpointPolicy) -> FallbackChain:
    """Without a fallback runtime, a form stands in the place of the model as its author built it."""
    left_out = {
        "compiled": endpoint.fallback_runtime == "none",
        "fallback": not endpoint.fallback_version,
    }
    return FallbackChain(tuple(level for level in LEVELS if not left_out.get(level)))


def _batch_limits(spec: ModelSpec, window_ms: float | None, config: InferenceConfig) -> BatchLimits:
    """The limits of a model's batches. window_ms: of its endpoint; None: the setting's."""
    batching, own = config.batching, spec.batching
    level = config.max_level if spec.max_level is None else min(config.max_level, spec.max_level)
    may_batch = config.enabled and batching.enabled and level >= _BATCHING_LEVEL and not spec.streams
    wait_ms = batching.max_wait_ms if window_ms is None else window_ms
    return BatchLimits(
        max_rows=(own.max_batch_size or batching.max_batch_size or _CPU_BATCH) if may_batch else 1,
        max_wait_s=wait_ms / 1000,
        max_tokens=own.max_tokens or 0,
        max_bytes=min(own.max_bytes or sys.maxsize, batching.max_queue_bytes // 2),
        sort_window=own.sort_window if may_batch else 1,
        ageing_s=config.queue.ageing_s,
        overhead_tokens=_SLICED_OVERHEAD if spec.format == "transformers" else _CPU_OVERHEAD,
    )


def _row_bytes(output: TensorSpec) -> int:
    """The bytes of one row of an output; 0 where its shape is open."""
    extents = [extent for extent in output.shape if extent != BATCH]
    sizes = [extent for extent in extents if isinstance(extent, int)]
    return math.prod(sizes) * DTYPES[output.dtype].itemsize if len(sizes) == len(extents) else 0


def _cache_ttl_s(spec: ModelSpec, own_ttl_s: float | None, config: InferenceConfig) -> float:
    """own_ttl_s: of its endpoint; None: the setting's."""
    if not config.cache.enabled:
        return 0.0
    # An output text may repeat the input.
    if config.effective_mode == "hashes_only" and any(output.dtype == STRING for output in spec.outputs):
        return 0.0
    return config.cache.ttl_seconds if own_ttl_s is None else own_ttl_s
