"""Pending jobs -> micro-batches: what the drain claims, ordered and cut into forwards. Pure decisions, no I/O."""

from penstock.workers.batching.batcher import Batch, Batcher, BatchKey, BatchLimits, Pending, Reason
from penstock.workers.batching.buckets import LengthBuckets, padded_tokens, padding_ratio

__all__ = [
    "Batch",
    "BatchKey",
    "BatchLimits",
    "Batcher",
    "LengthBuckets",
    "Pending",
    "Reason",
    "padded_tokens",
    "padding_ratio",
]
