"""Rows about the models themselves: what wrapping one costs."""

from __future__ import annotations

from typing import Final

from tests.benchmarks.proxy import measure_proxy
from tests.benchmarks.report import Progress, Row, verdict
from tests.benchmarks.scale import Scale

__all__ = ["proxied"]

_PROXY_US: Final = 2.0


def proxied(scale: Scale, say: Progress) -> list[Row]:
    """Microseconds that an InferenceProxy adds to each call."""
    cost = measure_proxy(scale.jobs)
    say(f"proxy: {cost.over_nothing_us:.2f} us over nothing, {cost.over_module_us:.2f} us over a module")
    return [
        Row(
            "`InferenceProxy` per call, over a callable that does nothing / over a small torch module",
            f"{cost.over_nothing_us:.2f} / {cost.over_module_us:.2f} us",
            "<= 2 us",
            "",
            verdict(required=max(cost) <= _PROXY_US),
            cost._asdict(),
        )
    ]
