"""A package's `module:build`, imported from its own folder and called.

Each package gets a private parent module, so that two packages may both have a `model.py`, a package's modules can
import each other relatively, and `sys.path` stays as it is.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from types import ModuleType
from typing import Any

from registry.errors import ConfigurationError
from registry.package import Package

__all__ = ["build_model", "forget_modules"]


def build_model(package: Package) -> Any:
    """What the package's `build()` returns. Raises ConfigurationError with the reason when it cannot be had."""
    module_name, attribute = package.entrypoint()
    reference = f"{package.spec.reference}: entrypoint {package.spec.entrypoint}"
    forget_modules(package)
    parent = _parent_module(package)
    sys.modules[parent.__name__] = parent
    try:
        build = getattr(importlib.import_module(f"{parent.__name__}.{module_name}"), attribute, None)
        if not callable(build):
            raise ConfigurationError(f"{reference}: found no function {attribute}, expected build() -> model")
        return build()
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"{reference}: raised {type(error).__name__}: {error!s:.200}") from error


def forget_modules(package: Package) -> None:
    """Drops the package's modules, so that the next build sees its files as they are then."""
    parent = _module_name(package)
    for name in [name for name in sys.modules if name == parent or name.startswith(f"{parent}.")]:
        del sys.modules[name]


def _parent_module(package: Package) -> ModuleType:
    parent = ModuleType(_module_name(package), f"Modules of the model package {package.spec.reference}.")
    parent.__path__ = [str(package.folder)]
    return parent


def _module_name(package: Package) -> str:
    return f"penstock_package_{hashlib.sha256(str(package.folder.resolve()).encode()).hexdigest()[:16]}"
