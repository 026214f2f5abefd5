"""Model packages from Python: `save` writes one.

    from penstock.package import save
    save(module, path="models/mine/1", signature={
        "inputs": {"x": ("float32", ["batch", 4])},
        "outputs": {"y": ("float32", ["batch", 2])},
    })

The import is lazy and needs no framework.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock.compose.authoring.saving import save

__all__ = ["save"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module("penstock.compose.authoring.saving"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
