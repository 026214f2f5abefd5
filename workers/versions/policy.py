"""What a package and the settings together say about one version: decided once, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.registry.package import ModelSpec
from penstock.registry.package.spec_sections import Precision
from penstock.registry.settings import InferenceConfig
from penstock.registry.tensors import STRING
from penstock.workers.batching.batcher import BatchLimits

__all__ = ["ENDPOINT", "VersionPolicy"]

ENDPOINT: Final = "infer"
"""The endpoint label of jobs that are plain forwards."""
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
    target_latency_s: float
    tokenises: bool
    """Whether preparing a batch beside another forward pays."""

    @classmethod
    def of(cls, spec: ModelSpec, config: InferenceConfig) -> VersionPolicy:
        """The policy of a package under these settings. Raises ConfigurationError for limits that no batch can keep."""
        endpoint = spec.policy_for(ENDPOINT)
        limits = _batch_limits(spec, config)
        repeats = config.enabled and spec.deterministic and not spec.streams
        has_size = spec.batching.max_batch_size or config.batching.max_batch_size
        return cls(
            limits=limits,
            is_sized_by_memory=limits.max_rows > 1 and not has_size,
            concurrency=endpoint.concurrency or 1,
            precision=endpoint.precision or config.precision,
            timeout_s=float(spec.timeout_s or config.timeout_seconds),
            max_crashes=config.queue.max_crashes,
            shares_flights=repeats and config.batching.single_flight,
            cache_ttl_s=_cache_ttl_s(spec, config) if repeats else 0.0,
            finite_outputs=tuple(
                output.name for output in spec.outputs if output.dtype.startswith("float") and not output.allow_nan
            ),
            target_latency_s=config.batching.target_latency_ms / 1000,
            tokenises=spec.format == "transformers",
        )


def _batch_limits(spec: ModelSpec, config: InferenceConfig) -> BatchLimits:
    """The limits of a model's batches."""
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


def _cache_ttl_s(spec: ModelSpec, config: InferenceConfig) -> float:
    hides_inputs = "hashes_only" in (config.privacy.mode, config.cache.privacy_mode)
    # An output text may repeat the input.
    has_text = any(output.dtype == STRING for output in spec.outputs)
    if not config.cache.enabled or (hides_inputs and has_text):
        return 0.0
    own_ttl_s = spec.policy_for(ENDPOINT).cache_ttl_s
    return config.cache.ttl_seconds if own_ttl_s is None else own_ttl_s
