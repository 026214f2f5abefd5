"""Calls of wrappers in one event loop, and what the process has counted of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from prometheus_client import REGISTRY

T = TypeVar("T")
X = [[1.0, 2.0, 3.0, 4.5]]


def run(main: Coroutine[Any, Any, T]) -> T:
    """In a loop of its own. A wait that never ends fails the test."""
    return asyncio.run(asyncio.wait_for(main, 180))


def counted(model: str) -> dict[tuple[str, str], float]:
    """The calls of a model in this process, by priority and outcome; each has its seconds, too."""
    samples = [sample for family in REGISTRY.collect() for sample in family.samples]
    mine = [sample for sample in samples if sample.labels.get("model_name") == model]

    def of(name: str) -> dict[tuple[str, str], float]:
        return {
            (sample.labels["priority"], sample.labels["outcome"]): sample.value
            for sample in mine
            if sample.name == name
        }

    calls = of("penstock_ray_serve_calls_total")
    assert of("penstock_ray_serve_seconds_count") == calls
    return calls
