"""What every package shows: a sorted `__all__`, types, and an import that costs little."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.servers import ROOT

TOP = ["compose", "producers", "registry", "safety", "testing", "workers"]
HEAVY = ["celery", "numpy", "pydantic", "redis", "torch", "transformers"]
MOST_MODULES = 40
"""`python -m tests.benchmarks --only imports` measures the milliseconds."""


def packages() -> list[str]:
    """Every package of the distribution, by its dotted name."""
    found = [source.parent.relative_to(ROOT) for top in TOP for source in (ROOT / top).rglob("__init__.py")]
    return sorted(["penstock", *(".".join(("penstock", *folder.parts)) for folder in found)])


def own_names(package: ModuleType) -> set[str]:
    """Public names that a package's `__init__` binds to something other than a module."""
    bound = {name: value for name, value in vars(package).items() if not name.startswith("_")}
    return {name for name, value in bound.items() if not isinstance(value, ModuleType)} - {"annotations"}


@pytest.mark.parametrize("name", packages())
def test_all_is_sorted_and_complete(name: str):
    """`__all__` is in plain order, each of its names exists, and no public name of the `__init__` is missing."""
    package = importlib.import_module(name)
    listed = list(package.__all__)
    assert listed == sorted(set(listed))
    modules = {module.name for module in pkgutil.iter_modules(package.__path__)}
    missing = [entry for entry in listed if entry not in modules and not hasattr(package, entry)]
    assert missing == []
    ignored = {"TYPE_CHECKING", "Any", "Final"}
    imported_names = {entry for entry in own_names(package) - ignored if entry not in listed}
    assert imported_names == set()


def test_package_is_typed():
    """Type checkers of users read our annotations."""
    assert (ROOT / "penstock" / "py.typed").exists()


def modules_after(statement: str) -> set[str]:
    """The modules that a fresh interpreter has imported when it has run the statement."""
    program = f"import sys; {statement}; print(*sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(ended.stdout.split())


def test_importing_penstock_costs_little():
    """It imports itself and a few small modules of Python: a backend imports it whether or not it submits."""
    imported = modules_after("import penstock") - modules_after("pass")
    foreign = {name.partition(".")[0] for name in imported} - {"penstock"} - set(sys.stdlib_module_names)
    assert foreign == set()
    assert [name for name in imported if name.startswith("penstock.")] == []
    assert len(imported) <= MOST_MODULES


def test_importing_penstock_loads_nothing_heavy():
    """Frameworks, NumPy and the broker's client come with the first use."""
    program = f"import sys, penstock; print([name for name in {HEAVY} if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_using_the_client_loads_no_framework():
    """A process that submits jobs never loads torch, transformers, onnxruntime or Celery."""
    program = (
        "import sys; from penstock import AsyncClient, Client; "
        "print([name for name in ('torch', 'transformers', 'onnxruntime', 'celery') if name in sys.modules])"
    )
    loaded = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


def test_no_file_names_a_path_of_one_machine():
    """Nothing that is shipped knows where it was written."""
    home = str(Path.home())
    shipped = [path for top in TOP for path in (ROOT / top).rglob("*.py")]
    assert [str(path) for path in shipped if str(ROOT) in path.read_text() or f"{home}/" in path.read_text()] == []
