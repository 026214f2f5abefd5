"""Runs a program in a process that can import the standard library and the named packages only.

    python only.py penstock,numpy,redis program.py argument ...

A package that is not named is missing, for a plain import and for one that is tried. Prints the names that were loaded.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class Only(MetaPathFinder):
    """Finds nothing, and ends the search for packages that are not named."""

    def __init__(self, names: set[str]) -> None:
        self._names = names | set(sys.stdlib_module_names) | {"__main__"}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for a package that is named: the next finder looks. Raises ModuleNotFoundError for others."""
        # The build's variables, whose module is called after the platform.
        if fullname.partition(".")[0] not in self._names and not fullname.startswith("_sysconfigdata"):
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
        return None


if __name__ == "__main__":
    allowed, program = sys.argv[1:3]
    sys.meta_path.insert(0, Only(set(allowed.split(","))))
    del sys.argv[:2]
    runpy.run_path(program, run_name="__main__")
    loaded = {name.partition(".")[0] for name in sys.modules} - set(sys.stdlib_module_names)
    sys.stderr.write("\n" + " ".join(sorted(loaded)) + "\n")
