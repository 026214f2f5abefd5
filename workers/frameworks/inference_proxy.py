"""A proxy for one model object: it counts each call and shows it to observers.

    caller -- call --> before(args, kwargs) --> the model's own method --> after(result, seconds) --> caller

The model is not changed: no attribute is set, no class is patched, and a direct call of it is not observed. Everything
but the call passes through the proxy: attributes are read from, set on and deleted from the model, and `isinstance`
sees the model's class.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeAlias

from penstock.registry.errors import InvalidInput

__all__ = ["After", "Before", "InferenceProxy"]

Before: TypeAlias = Callable[[tuple[Any, ...], Mapping[str, Any]], None]
"""Called with a call's arguments before the model is."""
After: TypeAlias = Callable[[Any, float], None]
"""Called with a call's result and its seconds; not when the model raised."""


class InferenceProxy:
    """Stands for one callable model.

    before, after: observers, called on the caller's thread; their exceptions reach the caller. A copy, deep or pickled,
    is a new proxy with a count of 0. Its only public name of its own is `call_count`.
    """

    # All other attributes are the model's, so reads and writes of them go to the model.
    __slots__ = (
        "__weakref__",
        "_proxy_after",
        "_proxy_before",
        "_proxy_count",
        "_proxy_infer",
        "_proxy_lock",
        "_proxy_model",
    )

    entry: ClassVar[str] = "__call__"
    """The model's method that is one inference."""

    _proxy_model: Any
    _proxy_infer: Callable[..., Any]
    _proxy_before: Before | None
    _proxy_after: After | None
    _proxy_count: int
    _proxy_lock: threading.Lock

    def __init__(self, model: Any, before: Before | None = None, after: After | None = None) -> None:
        """Raises InvalidInput for an object without the method that `entry` names."""
        infer = getattr(model, self.entry, None)
        if not callable(infer):
            raise InvalidInput(f"A {type(model).__name__} cannot be proxied. Expected an object with {self.entry}()")
        own = object.__setattr__
        own(self, "_proxy_model", model)
        own(self, "_proxy_infer", infer)
        own(self, "_proxy_before", before)
        own(self, "_proxy_after", after)
        own(self, "_proxy_count", 0)
        own(self, "_proxy_lock", threading.Lock())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's result. The call counts even if the model raises."""
        with self._proxy_lock:
            object.__setattr__(self, "_proxy_count", self._proxy_count + 1)
        if self._proxy_before is not None:
            self._proxy_before(args, kwargs)
        if self._proxy_after is None:
            return self._proxy_infer(*args, **kwargs)
        begun = time.perf_counter()
        result = self._proxy_infer(*args, **kwargs)
        self._proxy_after(result, time.perf_counter() - begun)
        return result

    @property
    def call_count(self) -> int:
        """Calls so far, by all threads."""
        return self._proxy_count

    @property
    def __wrapped__(self) -> Any:
        """The model."""
        return self._proxy_model

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._proxy_model)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proxy_model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._proxy_model, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._proxy_model, name)

    def __dir__(self) -> list[str]:
        return sorted({*dir(self._proxy_model), "call_count"})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._proxy_model!r})"

    def __bool__(self) -> bool:
        return bool(self._proxy_model)

    def __len__(self) -> int:
        return len(self._proxy_model)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._proxy_model)

    def __getitem__(self, key: Any) -> Any:
        return self._proxy_model[key]

    def __copy__(self) -> InferenceProxy:
        return type(self)(copy.copy(self._proxy_model), self._proxy_before, self._proxy_after)

    def __deepcopy__(self, memo: dict[int, Any]) -> InferenceProxy:
        # Observers are not copied: the copy calls the same ones.
        return type(self)(copy.deepcopy(self._proxy_model, memo), self._proxy_before, self._proxy_after)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return type(self), (self._proxy_model, self._proxy_before, self._proxy_after)
