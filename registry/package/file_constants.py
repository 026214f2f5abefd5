"""The constants of a Python file, statement by statement, without running it.

    N = 4                          -> N is 4 from this line on
    ROW = {"x": ("float32", [N])}  -> its N stays 4, whatever N becomes
    if ...: N = 8; ROW["z"] = ...  -> neither is a constant from this line on

A name is a constant while its value is certain. Literals hold lists and dictionaries, which two names may share: a
change of one of them ends all constants that share it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, Final, TypeAlias

__all__ = ["FileConstants"]

_CHANGING: Final = frozenset(
    {
        *("add", "append", "clear", "difference_update", "discard", "extend", "insert", "intersection_update"),
        *("pop", "popitem", "remove", "reverse", "setdefault", "sort", "symmetric_difference_update", "update"),
    }
)
"""Methods that change a list, a dictionary or a set."""
_READING: Final = frozenset({"all", "any", "len", "max", "min", "print", "repr", "sorted", "sum"})
"""Functions that change none of their arguments."""
_NAMESPACES: Final = frozenset({"eval", "exec", "globals", "locals", "vars"})
"""Functions through which any name may be changed."""
_MUTABLE: Final = (ast.Dict, ast.List, ast.Set)
_Scope: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda


@dataclass(frozen=True, slots=True)
class _Assigned:
    """A name's value. objects: numbers of the mutable objects that it may hold or share."""

    value: Any
    is_constant: bool
    objects: frozenset[int]


class FileConstants:
    """The constants above a line. Statements are read in their order."""

    def __init__(self) -> None:
        self._assigned: dict[str, _Assigned] = {}
        self._numbers = count()

    def read(self, statement: ast.stmt) -> None:
        """A statement of the file's top level was run."""
        match statement:
            case ast.Assign(targets=targets, value=value) if all(isinstance(one, ast.Name) for one in targets):
                self._assign([one.id for one in targets if isinstance(one, ast.Name)], value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self._assign([name], value)
            case ast.AnnAssign(target=ast.Name(), value=None):
                pass
            case _:
                self._change(statement)

    def value(self, expression: ast.expr) -> Any:
        """The value of literals and constants. Raises ValueError, TypeError, SyntaxError and RecursionError for others.

        Changes the expression.
        """
        # YAML writes shared objects as anchors, which would be other bytes of the same package.
        return _unshared(self._evaluated(expression))

    def changed_in(self, expression: ast.expr) -> str | None:
        """The first name in the expression whose value is not certain here, though the file binds it."""
        names = (one.id for one in ast.walk(expression) if isinstance(one, ast.Name))
        return next((name for name in names if name in self._assigned and not self._assigned[name].is_constant), None)

    def _assign(self, names: Iterable[str], value: ast.expr) -> None:
        self._change(value)
        is_mutable = any(isinstance(one, _MUTABLE) for one in ast.walk(value))
        objects = self._objects(one.id for one in ast.walk(value) if isinstance(one, ast.Name))
        try:
            assigned = _Assigned(self._evaluated(value), True, objects)
        except (ValueError, TypeError, SyntaxError, RecursionError):
            assigned = _Assigned(None, False, objects)
        if is_mutable or not assigned.is_constant:
            assigned = replace(assigned, objects=objects | {next(self._numbers)})
        self._assigned.update(dict.fromkeys(names, assigned))

    def _evaluated(self, expression: ast.expr) -> Any:
        return ast.literal_eval(_Substitution(self._assigned).visit(expression))

    def _change(self, node: ast.stmt | ast.expr) -> None:
        """Ends the constants that running the node may change."""
        found = _Changes()
        found.visit(node)
        changed = self._objects(found.changed)
        if found.changed & (found.bound | found.iterating):
            # A loop may have bound the name to any object that it mentions.
            changed |= self._objects(found.mentioned)
        for name, assigned in self._assigned.items():
            if found.is_of_any_name or changed & assigned.objects:
                self._assigned[name] = replace(assigned, is_constant=False)
        bound = _Assigned(None, False, self._objects(found.mentioned))
        self._assigned.update(dict.fromkeys(found.bound, bound))

    def _objects(self, names: Iterable[str]) -> frozenset[int]:
        held = (self._assigned[name].objects for name in names if name in self._assigned)
        return frozenset[int]().union(*held)


class _Substitution(ast.NodeTransformer):
    """Puts the values of constants in the places of their names."""

    def __init__(self, assigned: dict[str, _Assigned]) -> None:
        self._assigned = assigned

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """The value of the name; the name itself if it is no constant."""
        found = self._assigned.get(node.id)
        return ast.copy_location(ast.Constant(found.value), node) if found is not None and found.is_constant else node


class _Changes(ast.NodeVisitor):
    """What a node of the top level may do to names. local: the names of the function or class around it."""

    def __init__(self, local: frozenset[str] | None = None) -> None:
        self.bound: set[str] = set()
        self.changed: set[str] = set()
        """Names whose objects are changed in place."""
        self.iterating: set[str] = set()
        """Targets of comprehensions."""
        self.mentioned: set[str] = set()
        self.is_of_any_name = False
        self._local = local

    def visit_Name(self, node: ast.Name) -> None:
        """Read, bound or deleted."""
        if not isinstance(node.ctx, ast.Load):
            self._bind(node.id)
        elif self._local is None:
            self.mentioned.add(node.id)

    def visit_Global(self, node: ast.Global) -> None:
        """The function may bind them."""
        self.bound.update(node.names)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Assigned to or deleted."""
        self._visit_part(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Assigned to or deleted."""
        self._visit_part(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """`+=` changes a list in place."""
        self._change(node.target)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """A method that changes its object, or a function that reaches every name."""
        match node.func:
            case ast.Attribute(attr=name, value=value) if name in _CHANGING or name.startswith("__"):
                self._change(value)
            case ast.Name(id=name) if name in _NAMESPACES:
                self.is_of_any_name = True
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call whose result is not used is there for its effect, which may be one on its arguments."""
        if isinstance(call := node.value, ast.Call) and self._local is None and not _is_reading(call.func):
            for argument in (*call.args, *(keyword.value for keyword in call.keywords)):
                self._change(argument)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Bound; its body may run at any later time."""
        self._visit_scope(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        """See visit_FunctionDef."""
        self._visit_scope(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Bound; the names in its body are its own."""
        self._visit_scope(node)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        """See visit_FunctionDef."""
        self._visit_scope(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """Its targets are its own names."""
        for one in ast.walk(node.target):
            if isinstance(one, ast.Attribute | ast.Subscript):
                self._change(one)
            elif isinstance(one, ast.Name):
                self.iterating.add(one.id)
        for each in (node.iter, *node.ifs):
            self.visit(each)

    def visit_alias(self, node: ast.alias) -> None:
        """Imported."""
        self.is_of_any_name |= node.name == "*"
        self._bind(node.asname or node.name.partition(".")[0])

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        """Bound to the exception, then deleted."""
        self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchAs(self, node: ast.MatchAs) -> None:
        """Bound by a pattern."""
        self._bind(node.name)
        self.generic_visit(node)

    def visit_MatchStar(self, node: ast.MatchStar) -> None:
        """Bound by a pattern."""
        self._bind(node.name)

    def visit_MatchMapping(self, node: ast.MatchMapping) -> None:
        """Bound by a pattern."""
        self._bind(node.rest)
        self.generic_visit(node)

    def _bind(self, name: str | None) -> None:
        if name is not None and self._local is None:
            self.bound.add(name)

    def _change(self, node: ast.expr) -> None:
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Call):
            node = node.func if isinstance(node, ast.Call) else node.value
        if isinstance(node, ast.Name) and node.id not in (self._local or ()):
            self.changed.add(node.id)

    def _visit_part(self, node: ast.Attribute | ast.Subscript) -> None:
        if not isinstance(node.ctx, ast.Load):
            self._change(node)
        self.generic_visit(node)

    def _visit_scope(self, node: _Scope) -> None:
        self._bind(getattr(node, "name", None))
        body = node.body if isinstance(node.body, list) else [node.body]
        for each in ast.iter_child_nodes(node):
            if each not in body:
                self.visit(each)
        within = _Changes((self._local or frozenset()) | _own_names(node, body))
        for each in body:
            within.visit(each)
        self.bound |= within.bound
        self.changed |= within.changed
        self.is_of_any_name |= within.is_of_any_name


def _is_reading(function: ast.expr) -> bool:
    return isinstance(function, ast.Name) and function.id in _READING


def _own_names(scope: _Scope, body: Iterable[ast.AST]) -> frozenset[str]:
    """The local names of a function or class."""
    names = set() if isinstance(scope, ast.ClassDef) else {each.arg for each in _arguments(scope.args)}
    nodes = list(_own_nodes(body))
    names |= {each.id for each in nodes if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    return frozenset(names.difference(*(each.names for each in nodes if isinstance(each, ast.Global))))


def _arguments(arguments: ast.arguments) -> Iterator[ast.arg]:
    return (each for each in ast.walk(arguments) if isinstance(each, ast.arg))


def _own_nodes(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """The nodes of a body without those of the functions and classes in it."""
    waiting = list(body)
    while waiting:
        node = waiting.pop()
        yield node
        if not isinstance(node, _Scope):
            waiting += ast.iter_child_nodes(node)


def _unshared(value: Any) -> Any:
    """A copy in which no two places have the same list or dictionary."""
    if isinstance(value, dict):
        return {key: _unshared(each) for key, each in value.items()}
    return type(value)(map(_unshared, value)) if isinstance(value, list | tuple | set) else value
