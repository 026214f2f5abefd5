"""Shadows for tests: an order, pairs of it, a shadow worker that the test steps, and a candidate that misbehaves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np

from penstock.registry.broker.redis_shadow import RedisShadow
from penstock.registry.envelope import Keyring, PairHeader
from penstock.registry.package import ModelSpec
from penstock.registry.queues import new_job_id
from penstock.registry.settings import Settings
from penstock.registry.shadow import ShadowOrder, ShadowPair
from penstock.registry.tensors import encode
from penstock.workers.observe.metrics import InferenceMetrics
from penstock.workers.shadow.consumer import ComparedPair, ShadowOptions, ShadowWorker
from penstock.workers.versions.repository import DiskRepository

__all__ = ["UNSIGNED", "order_of", "pair_of", "publish_spec", "shadow_worker"]

UNSIGNED = Keyring.parse(None)
FAR_MS = 10**13
"""A time of expiry that no test reaches."""


def order_of(model: str, **more: Any) -> ShadowOrder:
    """An order for all jobs, with version 1 as the candidate, and without a canary, which would end it at a failure."""
    values: dict[str, Any] = {"candidate": "1", "share": 1.0, "until_ms": FAR_MS, "canary_pairs": 0, **more}
    return ShadowOrder(id=uuid4().hex[:16], model=model, **values)


def pair_of(
    order: ShadowOrder, first: float = 1.0, *, factor: float = 2.0, version: str = "2", keyring: Keyring = UNSIGNED
) -> bytes:
    """A sealed pair: one row that begins with `first`, answered with `factor` times it."""
    row = np.array([[first, 1, 2, 3]], np.float32)
    inputs, input_body = encode({"x": row})
    outputs, output_body = encode({"y": row * np.float32(factor)})
    header = PairHeader(
        id=new_job_id(order.model),
        tenant="default",
        model=order.model,
        shadow=order.id,
        version=version,
        content_hash="c" * 64,
        inputs=inputs,
        outputs=outputs,
        input_bytes=len(input_body),
        compute_ms=4.0,
        batch_rows=2,
    )
    return ShadowPair(header, input_body, output_body).seal(keyring)


def publish_spec(end: RedisShadow, root: Path, model: str, version: str) -> None:
    """Has the broker name this version under the models root as the active one."""
    package = DiskRepository(root, [root]).package(model, version)
    spec: ModelSpec = package.spec
    end._run(["SET", f"{{{model}}}:spec", spec.to_json()])


def shadow_worker(
    end: RedisShadow,
    model: str,
    settings: Settings,
    *,
    keyring: Keyring = UNSIGNED,
    metrics: InferenceMetrics | None = None,
    on_compared: Callable[[ComparedPair], None] = lambda _: None,
    lease_s: float = 15.0,
    **options: Any,
) -> ShadowWorker:
    """A shadow worker that the test steps."""
    return ShadowWorker(
        end,
        model,
        DiskRepository.of(settings),
        settings.inference,
        keyring,
        metrics or InferenceMetrics((1.0,)),
        ShadowOptions(consumer=f"shadow:{uuid4().hex[:8]}", on_compared=on_compared, lease_s=lease_s, **options),
    )
