"""Runs a program in a process that can import the standard library and the named packages only.

    python only.py penstock,numpy,redis program.py argument ...

A package that is not named is missing, for a plain import and for one that is tried. Prints the names that were loaded.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.machinery import BuiltinImporter, FrozenImporter, ModuleSpec, PathFinder
from types import ModuleType


class Only(PathFinder):
    """Finds the packages that are named, the standard library among them, and no other."""

    names = frozenset(sys.stdlib_module_names) | {"__main__"}

    @classmethod
    def find_spec(
        cls, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """As PathFinder finds it; None for a package that is not named."""
        top = fullname.partition(".")[0]
        # The module of the build's variables is called after the platform.
        is_named = top in cls.names or top.startswith("_sysconfigdata")
        return super().find_spec(fullname, path, target) if is_named else None


if __name__ == "__main__":
    allowed, program = sys.argv[1:3]
    Only.names |= set(allowed.split(","))
    # Whatever else finds modules would find more: the hooks of editable installs, for example.
    sys.meta_path[:] = [BuiltinImporter, FrozenImporter, Only]
    del sys.argv[:2]
    runpy.run_path(program, run_name="__main__")
    loaded = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
    sys.stderr.write("\n" + " ".join(sorted(loaded)) + "\n")
