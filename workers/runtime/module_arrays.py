"""Arrays and tensors that the modules of a package keep outside of their model, and which of them change.

    loaded, warmed up -> ModuleArrays: a digest of each
    a second instance of the model is to run beside the first one -> changed: those that jobs have changed meanwhile

Copies of a model share them. One that a forward writes to, such as a buffer of a module, would mix the answers of two
forwards that run at the same time; a table that is only read does not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from types import ModuleType
from typing import Any, Final

__all__ = ["ModuleArrays"]

_MOST_BYTES: Final = 256 * 1024 * 1024
"""More of one array is not read: its first bytes stand for it."""


class ModuleArrays:
    """The arrays as they are now. The modules are asked again by `changed`."""

    def __init__(self, modules: Iterable[ModuleType]) -> None:
        self._modules = tuple(modules)
        self._digests = self._read()

    def changed(self) -> list[str]:
        """The names of those whose content is another one than when this object was made, and of new ones."""
        return sorted(name for name, digest in self._read().items() if self._digests.get(name) != digest)

    def _read(self) -> dict[str, bytes]:
        return {name: _digest(array) for module in self._modules for name, array in _arrays_of(module)}


def _arrays_of(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Globals, attributes of the module's own classes, and what lists, tuples and dicts of both hold."""
    for name, value in _items(vars(module)):
        if isinstance(value, type) and value.__module__ == module.__name__:
            owned = [(f"{name}.{attribute}", each) for attribute, each in _items(vars(value))]
        else:
            owned = [(name, value)]
        for place, each in owned:
            if isinstance(each, dict):
                parts: Iterable[tuple[str, Any]] = [(f"{place}[{key!r:.40}]", part) for key, part in _items(each)]
            elif isinstance(each, list | tuple):
                parts = [(f"{place}[{number}]", part) for number, part in enumerate([*each])]
            else:
                parts = [(place, each)]
            yield from ((part_name, part) for part_name, part in parts if _is_array(part))


def _items(found: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    """The keys are copied in one step, because a forward may change the mapping meanwhile."""
    return [(key, found.get(key)) for key in list(found)]


def _is_array(value: object) -> bool:
    import numpy as np
    import torch

    return isinstance(value, np.ndarray | torch.Tensor)


def _digest(array: Any) -> bytes:
    """Of its content; the same for all that have none that can be read, such as sparse tensors."""
    try:
        return _read_digest(array)
    except Exception:  # libraries raise what they like, and a load must not fail for it
        return b""


def _read_digest(array: Any) -> bytes:
    import numpy as np
    import torch

    if isinstance(array, torch.Tensor):
        whole = array.detach().reshape(-1)[: _MOST_BYTES // max(1, array.element_size())]
        content = whole.cpu().contiguous().view(torch.uint8).numpy()
    else:
        content = np.ascontiguousarray(array).reshape(-1)[: _MOST_BYTES // max(1, array.itemsize)]
        if content.dtype.hasobject:
            return repr(content).encode()
    # Dates and times have no buffer of their own.
    return hashlib.blake2b(content.view(np.uint8).data, digest_size=16).digest()
