"""A function or class that `@penstock.model` declares -> the callable of a `python` package.

function                        -> called with the inputs by name
class -> instance -> load()     -> its predict is called with the inputs by name
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator, Mapping
from typing import Any

from penstock.registry.package.model_decorator import DECLARED
from penstock.registry.tensors import Array
from penstock.workers.runtime.base import StreamContext

__all__ = ["callable_of", "is_declared"]


def is_declared(found: object) -> bool:
    """Whether `@penstock.model` stands above the object."""
    return getattr(found, DECLARED, False) is True


def callable_of(declared: Any, device: str, *, streams: bool) -> Callable[..., Any]:
    """The model, loaded. `load` of a class takes the device if it has an argument of this name."""
    predict = declared
    if inspect.isclass(declared):
        instance: Any = declared()
        load = getattr(instance, "load", None)
        if load is not None:
            takes_device = "device" in inspect.signature(load).parameters
            load(**({"device": device} if takes_device else {}))
        predict = instance.predict
    return _streaming(predict) if streams else lambda inputs: predict(**inputs)


def _streaming(predict: Callable[..., Any]) -> Callable[..., Any]:
    takes_context = "ctx" in inspect.signature(predict).parameters

    def stream(inputs: Mapping[str, Array], ctx: StreamContext) -> Generator[Any, None, Any]:
        context = {"ctx": ctx} if takes_context else {}
        return (yield from predict(**inputs, **context))

    return stream
