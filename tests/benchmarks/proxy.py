"""What an InferenceProxy adds to one call: over a callable that does nothing, and over a tiny torch module."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from penstock.workers.frameworks.inference_proxy import InferenceProxy
from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale

__all__ = ["measure", "overhead_us"]

_REQUIRED_US: Final = 2.0


class ProxyCost(NamedTuple):
    """Microseconds that the proxy adds to a call."""

    over_nothing_us: float
    over_module_us: float


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    cost = _cost(scale.jobs)
    say(f"proxy: {cost.over_nothing_us:.2f} us over nothing, {cost.over_module_us:.2f} us over a module")
    return [
        Row(
            "`InferenceProxy` per call, over a callable that does nothing / over a small torch module",
            f"{cost.over_nothing_us:.2f} / {cost.over_module_us:.2f} us",
            "<= 2 us",
            "",
            verdict(required=max(cost) <= _REQUIRED_US),
            cost._asdict(),
        )
    ]


def _cost(calls: int) -> ProxyCost:
    import torch

    module, row = torch.nn.Linear(4, 4).eval(), torch.zeros(1, 4)
    with torch.inference_mode():
        over_module = overhead_us(module, row, calls=calls)
    return ProxyCost(overhead_us(lambda x: x, 0, calls=calls), over_module)


def overhead_us(model: Callable[[Any], Any], argument: Any, *, calls: int) -> float:
    """Microseconds that a call of the proxy of `model` takes beyond a call of `model`: medians, call by call in turn.

    Other users of the machine slow a part of the calls down, and the middle one stays what it is.
    """
    proxy = InferenceProxy(model)
    turns = [(_seconds(model, argument), _seconds(proxy, argument)) for _ in range(calls)]
    direct, proxied = (median(seconds) for seconds in zip(*turns, strict=True))
    return (proxied - direct) * 1e6


def _seconds(call: Callable[[Any], Any], argument: Any) -> float:
    begun = time.perf_counter()
    call(argument)
    return time.perf_counter() - begun
