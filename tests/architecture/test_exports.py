"""A module's `__all__` is what other modules may import from it, and nothing else is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.servers import ROOT
from tests.sources import nodes, parsed

ROOMS = ("compose", "producers", "registry", "safety", "testing", "workers")


class Imported(NamedTuple):
    """One `from module import name`, and the file in which it stands."""

    importer: str
    module: str
    name: str


def sources(root: Path) -> dict[str, Path]:
    """The product's modules below a root, by the name under which they are imported."""
    found = {}
    for file in (path for room in ROOMS for path in (root / room).rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        found[".".join(("penstock", *(parts[:-1] if parts[-1] == "__init__" else parts)))] = file
    return found


def exported(tree: ast.Module) -> frozenset[str]:
    """The names in a module's `__all__`; empty without one."""
    for statement in tree.body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            value = getattr(statement, "value", None)
            return frozenset(ast.literal_eval(value)) if value is not None else frozenset()
    return frozenset()


def unlisted(modules: dict[str, Path]) -> Iterator[Imported]:
    """Imports of names that the imported module does not list. Submodules need no listing."""
    trees = {name: parsed(file) for name, file in modules.items()}
    listed = {name: exported(tree) for name, tree in trees.items()}
    for importer, file in modules.items():
        for node in nodes(file):
            if not isinstance(node, ast.ImportFrom) or node.module not in listed:
                continue
            for alias in node.names:
                if alias.name not in listed[node.module] and f"{node.module}.{alias.name}" not in listed:
                    yield Imported(importer, node.module, alias.name)


def test_only_listed_names_are_imported():
    """Every name that a module imports from one of our modules is in that module's `__all__`."""
    assert list(unlisted(sources(ROOT))) == []


def test_no_private_name_is_listed():
    """A name with a leading underscore is in no `__all__`, so that no other module imports it."""
    for name, file in sources(ROOT).items():
        private = {entry for entry in exported(parsed(file)) if entry.startswith("_")}
        assert not private, name


@pytest.mark.parametrize("name", ["hidden", "_private"])
def test_an_unlisted_import_is_found(tmp_path: Path, name: str):
    """The test fails for a name that is not listed, and accepts submodules and listed names."""
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry" / "__init__.py").write_text("")
    (tmp_path / "registry" / "one.py").write_text('__all__ = ["shown"]\nshown = hidden = _private = 1\n')
    (tmp_path / "registry" / "two.py").write_text(
        f"from penstock.registry import one\nfrom penstock.registry.one import shown, {name}\n"
    )
    assert list(unlisted(sources(tmp_path))) == [Imported("penstock.registry.two", "penstock.registry.one", name)]
