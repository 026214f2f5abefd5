"""Which settings the package reads: its sources -> the types of expressions -> the keys of fields that are read.

A small type inference for one purpose: it knows the section classes, and follows parameters, assignments, attributes
of `self` and return annotations. A read in a property of the sections counts when the property itself is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel

from penstock.registry import settings, settings_sections
from penstock.registry.settings import Settings
from penstock.registry.settings_sections import InferenceConfig, SafeguardsConfig
from tests.servers import ROOT
from tests.sources import nodes, parsed

SHOWN_ONLY = ("compose/doctor/", "safety/security.py")
"""Sources that compare or show settings: a read there is no effect."""
_FOLDERS = ("compose", "producers", "registry", "safety", "testing", "workers")
_SETTINGS_FILES = [ROOT / "registry" / name for name in ("settings.py", "settings_sections.py")]
_CLASSES: dict[str, type[BaseModel]] = {
    name: found
    for name, found in (vars(settings) | vars(settings_sections)).items()
    if isinstance(found, type) and issubclass(found, BaseModel) and found.__module__.startswith(settings.__name__)
}


def _paths() -> dict[str, str]:
    """The key of each section's own fields, by the name of its class: `queue.` for QueueConfig."""
    paths = {"Settings": "", "InferenceConfig": "", "WorkerSettings": "worker."}
    waiting: list[type[BaseModel]] = [InferenceConfig]
    while waiting:
        section = waiting.pop()
        for name, field in section.model_fields.items():
            if isinstance(field.default, BaseModel):
                paths[type(field.default).__name__] = f"{paths[section.__name__]}{name}."
                waiting.append(type(field.default))
    return paths


_PATHS = _paths()
_SECTION_NAMES = {
    name: type(field.default).__name__
    for section in (Settings, InferenceConfig, SafeguardsConfig)
    for name, field in section.model_fields.items()
    if isinstance(field.default, BaseModel)
}
"""The class of a section by the name of its field: names decide where a type is not known."""


class _Reads(ast.NodeVisitor):
    """The keys that one source reads, and the attributes of sections that are no fields: properties and methods."""

    def __init__(self, returned: dict[str, str]) -> None:
        self.keys: set[str] = set()
        self.others: set[str] = set()
        self._returned = returned
        self._known: list[dict[str, str]] = [{}]
        self._of_self: dict[str, str] = {}

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._of_self = self._of_self, {}
        own = {"self": node.name} if node.name in _CLASSES else {}
        self._known.append(own)
        for _ in range(2):  # an attribute may be read above the method that sets it
            self.generic_visit(node)
        self._known.pop()
        self._of_self = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
        self._known.append({each.arg: found for each in arguments if (found := _annotated(each.annotation))})
        self.generic_visit(node)
        self._known.pop()

    visit_AsyncFunctionDef = visit_FunctionDef  # type: ignore[assignment]  # the same for both kinds

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=False))
            for to, value in pairs:
                self._bind(to, self._type(value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        self._bind(node.target, _annotated(node.annotation) or (self._type(node.value) if node.value else ""))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        found = self._type(node.value)
        if not found or not isinstance(node.ctx, ast.Load):
            return
        if node.attr not in _CLASSES[found].model_fields:
            self.others.add(node.attr)
        elif node.attr not in _SECTION_NAMES:
            self.keys.add(_PATHS[found] + node.attr)

    def _bind(self, target: ast.expr, found: str) -> None:
        if isinstance(target, ast.Name):
            self._known[-1][target.id] = found
        elif found and isinstance(target, ast.Attribute) and _is_self(target.value):
            self._of_self[target.attr] = found

    def _type(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return next((known[node.id] for known in reversed(self._known) if node.id in known), "")
        if isinstance(node, ast.Attribute):
            if _is_self(node.value) and node.attr in self._of_self:
                return self._of_self[node.attr]
            if node.attr in ("settings", "_settings"):
                return "Settings"
            return _SECTION_NAMES.get(node.attr, "") if node.attr != "worker" or self._type(node.value) else ""
        if isinstance(node, ast.Call):
            return self._type_of_call(node.func)
        if isinstance(node, ast.BoolOp):
            return next(filter(None, map(self._type, node.values)), "")
        if isinstance(node, ast.IfExp):
            return self._type(node.body) or self._type(node.orelse)
        return ""

    def _type_of_call(self, called: ast.expr) -> str:
        if isinstance(called, ast.Name):
            return called.id if called.id in _CLASSES else self._returned.get(called.id, "")
        if isinstance(called, ast.Attribute):
            if isinstance(called.value, ast.Name) and called.value.id in _CLASSES:
                return called.value.id  # Settings.load
            return self._returned.get(called.attr, "")
        return ""


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _annotated(annotation: ast.expr | None) -> str:
    """The section class that an annotation names, also as `X | None`."""
    if annotation is None:
        return ""
    names = {node.id for node in ast.walk(annotation) if isinstance(node, ast.Name)} & _CLASSES.keys()
    return names.pop() if len(names) == 1 and not isinstance(annotation, ast.Subscript) else ""


def _sources() -> Iterator[Path]:
    yield ROOT / "celeryconfig.py"
    for folder in _FOLDERS:
        yield from sorted((ROOT / folder).rglob("*.py"))


def _reads_of(tree: ast.AST, returned: dict[str, str]) -> _Reads:
    reads = _Reads(returned)
    reads.visit(tree)
    return reads


def keys_that_are_read(*, shown: bool = False) -> set[str]:
    """The keys of the settings that something in the package reads. shown: reads of SHOWN_ONLY alone, instead."""
    trees = {path: parsed(path) for path in _sources() if path not in _SETTINGS_FILES}
    returned = {
        node.name: found
        for path in trees
        for node in nodes(path)
        if isinstance(node, ast.FunctionDef) and (found := _annotated(node.returns))
    }
    keys: set[str] = set()
    used: set[str] = set()
    for path, tree in trees.items():
        if str(path.relative_to(ROOT)).startswith(SHOWN_ONLY) == shown:
            reads = _reads_of(tree, returned)
            keys |= reads.keys
            used |= reads.others
    return keys | _read_by_properties(used, returned)


def _read_by_properties(used: set[str], returned: dict[str, str]) -> set[str]:
    """What the properties and methods of sections read, those that others of them use included."""
    methods = [
        (section.name, method)
        for file in _SETTINGS_FILES
        for section in parsed(file).body
        if isinstance(section, ast.ClassDef) and section.name in _CLASSES
        for method in section.body
        if isinstance(method, ast.FunctionDef)
    ]
    keys: set[str] = set()
    done: set[str] = set()
    while waiting := used - done:
        done |= waiting
        for owner, method in methods:
            if method.name in waiting:
                reads = _reads_of(ast.ClassDef(owner, [], [], [method], []), returned)
                keys |= reads.keys
                used = used | reads.others
    return keys
