"""A package's `module:build`, executed from the bytes that were hashed, and called.

    import of a package's module -> its source is read -> compared with the manifest -> these bytes are executed

Each load gets a private parent module. So two packages, or two versions of one package, may both have a `model.py`; a
package's modules can import each other relatively; and `sys.path` stays unchanged. Only sources are imported: no
compiled cache is read or written, and no binary extension of a package is loaded.
"""

from __future__ import annotations

import hashlib
import importlib
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder, SourceLoader
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from types import ModuleType
from typing import Any, Final

from penstock.registry.errors import ConfigurationError, shown
from penstock.registry.package import Package
from penstock.registry.package.manifest import Manifest
from penstock.workers.runtime.declared_model import callable_of, is_declared
from penstock.workers.runtime.tracebacks import message_of, name_of, placed

__all__ = ["PackageModules"]


class PackageModules:
    """The Python modules of one loaded package."""

    def __init__(self, package: Package, manifest: Manifest) -> None:
        self._package = package
        self._files = manifest.files
        self._name = _FINDER.register(self, f"penstock_package_{manifest.content_hash[:16]}")

    def build(self, device: str = "cpu") -> Any:
        """The object that `build()` returns, or the model that `@penstock.model` declares at the entry point.

        device: for a declared class. Raises ConfigurationError with the reason when there is none.
        """
        module_name, attribute = self._package.entrypoint()
        reference = f"{self._package.spec.reference}: entrypoint {self._package.spec.entrypoint}"
        parent = ModuleType(self._name, f"Modules of the model package {self._package.spec.reference}.")
        parent.__path__ = []
        sys.modules[self._name] = parent
        try:
            build = getattr(importlib.import_module(f"{self._name}.{module_name}"), attribute, None)
            if not callable(build):
                raise ConfigurationError(f"{reference}: found no function {attribute}, expected build() -> model")
            if is_declared(build):
                return callable_of(build, device, streams=self._package.spec.streams)
            return build()
        except ConfigurationError:
            raise
        except KeyboardInterrupt:
            # In a command it is the user's.
            raise
        except BaseException as error:
            problem = f"raised {name_of(error)}: {message_of(error)}{placed(error)}"
            raise ConfigurationError(f"{reference}: {problem}") from error

    def loaded(self) -> list[ModuleType]:
        """The modules that have run."""
        # The names are copied in one step, because another thread may be importing.
        names = [name for name in list(sys.modules) if name.startswith(f"{self._name}.")]
        return [module for name in names if (module := sys.modules.get(name)) is not None]

    def forget(self) -> None:
        """Drops the modules. Their objects keep working, except for imports that have not run yet."""
        _FINDER.forget(self._name)
        # The list is copied in one step, because another thread may be importing.
        for name in [name for name in list(sys.modules) if name == self._name or name.startswith(f"{self._name}.")]:
            sys.modules.pop(name, None)

    def find(self, name: str) -> ModuleSpec | None:
        """The spec of the module with this dotted path inside the package; None where there is none."""
        path = name.replace(".", "/")
        full_name = f"{self._name}.{name}"
        for file, locations in ((f"{path}/__init__.py", []), (f"{path}.py", None)):
            if file in self._files:
                location = self._package.folder / file
                loader = _HashedSource(self, file)
                return spec_from_file_location(full_name, location, loader=loader, submodule_search_locations=locations)
        if any(file.startswith(f"{path}/") for file in self._files):
            return ModuleSpec(full_name, None, is_package=True)
        return None

    def path(self, file: str) -> str:
        """The path of a file of the package."""
        return str(self._package.folder / file)

    def read(self, file: str) -> bytes:
        """The bytes of a file of the package. Raises ConfigurationError if they differ from the hashed bytes."""
        data = (self._package.folder / file).read_bytes()
        if hashlib.sha256(data).hexdigest() != self._files[file]:
            raise ConfigurationError(
                f"{self._package.spec.reference}: file {shown(file)}: changed since it was hashed, "
                "expected the same bytes"
            )
        return data


class _HashedSource(SourceLoader):
    """Loads one module. It gives no change time, so Python looks for no compiled cache."""

    def __init__(self, modules: PackageModules, file: str) -> None:
        self._modules = modules
        self._file = file

    def get_filename(self, fullname: str) -> str:
        """The source's path, for tracebacks."""
        return self._modules.path(self._file)

    @property
    def package_file(self) -> str:
        """See PackageSource."""
        return self._file

    def get_data(self, path: str) -> bytes:
        """The source. Raises OSError for any other file, as a loader must."""
        if path != self._modules.path(self._file):
            raise OSError(f"This loader reads only {self._file}")
        return self._modules.read(self._file)


class _PackageFinder(MetaPathFinder):
    """Finds the modules of all loaded packages. The process has one, because every import asks `sys.meta_path`."""

    def __init__(self) -> None:
        self._packages: dict[str, PackageModules] = {}

    def register(self, modules: PackageModules, name: str) -> str:
        """A unique name for the parent module, also when the same files are loaded twice at a time."""
        if self not in sys.meta_path:
            sys.meta_path.append(self)
        number = 1
        unique = name
        # setdefault is atomic, so another thread may load the same package meanwhile.
        while self._packages.setdefault(unique, modules) is not modules:
            number += 1
            unique = f"{name}_{number}"
        return unique

    def forget(self, name: str) -> None:
        """No module below this name is found any more."""
        self._packages.pop(name, None)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The spec of a module of a package; None for any other module."""
        parent, _, name = fullname.partition(".")
        modules = self._packages.get(parent)
        return modules.find(name) if modules is not None and name else None


_FINDER: Final = _PackageFinder()
