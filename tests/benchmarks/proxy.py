"""What an InferenceProxy adds to one call: over a callable that does nothing, and over a tiny torch module."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from workers.frameworks.inference_proxy import InferenceProxy

__all__ = ["ProxyCost", "measure_proxy", "overhead_us"]

_TURNS: Final = 7


class ProxyCost(NamedTuple):
    """Microseconds that the proxy adds to a call."""

    over_nothing_us: float
    over_module_us: float


def measure_proxy(calls: int = 20_000) -> ProxyCost:
    """The quickest turn of each, taken in turns of `calls` calls; of the module a tenth as many."""
    import torch

    module, row = torch.nn.Linear(4, 4).eval(), torch.zeros(1, 4)
    with torch.inference_mode():
        over_module = overhead_us(module, row, calls=max(1, calls // 10))
    return ProxyCost(overhead_us(lambda x: x, 0, calls=calls), over_module)


def overhead_us(model: Callable[[Any], Any], argument: Any, *, calls: int) -> float:
    """Microseconds a call of the proxy of `model` takes beyond a call of `model`, turn about."""
    proxy = InferenceProxy(model)
    turns = [(_seconds(model, argument, calls), _seconds(proxy, argument, calls)) for _ in range(_TURNS)]
    quickest = min(proxied for _, proxied in turns) - min(direct for direct, _ in turns)
    return quickest / calls * 1e6


def _seconds(call: Callable[[Any], Any], argument: Any, calls: int) -> float:
    begun = time.perf_counter()
    for _ in range(calls):
        call(argument)
    return time.perf_counter() - begun
