"""Finds assertions that compare times which a test read from a clock.

    time.monotonic() --assigned, subtracted, appended, returned--> tainted names, fields and functions
    assert <ordering or approx of something tainted>           --> Finding
    check(tainted), where check asserts an order of its parameter  --> Finding

Names are followed inside a function, functions and fields by their names across all files that are looked at. A call
gives a tainted value only where it is a function of the tests that returns one, or arithmetic such as `max`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Final, NamedTuple

__all__ = ["Finding", "clock_comparisons"]

CLOCKS: Final = frozenset({"monotonic", "perf_counter", "process_time", "thread_time", "time"})
ARITHMETIC: Final = frozenset(
    name
    for names in ("abs float int max mean median min round sum", "dict list set sorted tuple zip", "approx")
    for name in names.split()
)
ADDING: Final = frozenset({"add", "append", "extend", "setdefault"})
ORDER: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
FOLLOWED: Final = (
    *(ast.Assert, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr),
    *(ast.For, ast.comprehension, ast.Call, ast.FunctionDef, ast.AsyncFunctionDef),
)
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Finding(NamedTuple):
    """One assertion over clock times."""

    path: str
    line: int


@dataclass
class _Known:
    """What is known of all files so far; it only grows."""

    functions: set[str] = field(default_factory=set)
    """Names of functions that return a clock time."""
    fields: set[str] = field(default_factory=set)
    """Names of attributes that hold one."""
    asserted: dict[str, set[str]] = field(default_factory=dict)
    """By function: its parameters whose order it asserts."""
    parameters: dict[str, list[str]] = field(default_factory=dict)
    """By function and class: the names of its parameters and fields in order."""
    called: set[str] = field(default_factory=set)
    """Names that are called anywhere: what another function asserts of its parameters matters to none."""

    def size(self) -> int:
        return len(self.functions) + len(self.fields) + sum(map(len, self.asserted.values()))


def clock_comparisons(trees: Mapping[str, ast.Module]) -> list[Finding]:
    """The findings in these files, given as path and tree."""
    known = _Known()
    for tree in trees.values():
        _learn_parameters(tree, known)
    size = -1
    while size != known.size():
        size = known.size()
        for tree in trees.values():
            for scope in _scopes(tree):
                _learn(scope, known)
    return sorted({Finding(path, line) for path, tree in trees.items() for line in _findings(tree, known)})


def _learn_parameters(tree: ast.Module, known: _Known) -> None:
    for node in ast.walk(tree):
        if isinstance(node, Function):
            names = [each.arg for each in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            known.parameters[node.name] = [name for name in names if name not in ("self", "cls")]
        elif isinstance(node, ast.ClassDef):
            annotated = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
            known.parameters[node.name] = [each.id for each in annotated if isinstance(each, ast.Name)]
        elif isinstance(node, ast.Call):
            known.called.add(_name_of(node.func))


@cache
def _scopes(tree: ast.Module) -> list[ast.Module | Function]:
    """The module and each of its functions that lies in no other; methods are such functions."""
    found: list[ast.Module | Function] = [tree]
    waiting: list[ast.AST] = [*tree.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function):
            found.append(node)
        else:
            waiting += [each for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt)]
    return found


class _Inside(NamedTuple):
    """What a scope holds."""

    followed: list[ast.AST]
    names: frozenset[str]
    """Of variables, attributes and functions."""
    reads_clock: bool

    def may_hold(self, known: _Known, given: Iterable[str] = ()) -> bool:
        """Whether there is anything by which a clock time can come into the scope."""
        sources = (known.functions, known.fields, given)
        return self.reads_clock or not all(map(self.names.isdisjoint, sources))


@cache
def _inside(scope: ast.Module | Function) -> _Inside:
    """What is followed in the scope: of a module outside of functions, of a function in its inner ones as well."""
    followed: list[ast.AST] = []
    names: set[str] = set()
    reads_clock = False
    waiting: list[ast.AST] = [*scope.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Name | ast.Attribute):
            names.add(_name_of(node))
            reads_clock = reads_clock or _reads_clock(node)
        elif isinstance(node, FOLLOWED):
            if isinstance(node, Function) and isinstance(scope, ast.Module):
                continue
            followed.append(node)
        waiting += ast.iter_child_nodes(node)
    return _Inside(followed, frozenset(names), reads_clock)


class _Taint:
    """Which names of one scope hold clock times. `given`: names that hold one from the start."""

    def __init__(self, scope: ast.Module | Function, known: _Known, given: Iterable[str] = ()) -> None:
        self._known = known
        self.names = set(given)
        self.fields: set[str] = set()
        inside = _inside(scope)
        nodes = inside.followed if inside.may_hold(known, self.names) else []
        size = -1
        while size != len(self.names) + len(self.fields):
            size = len(self.names) + len(self.fields)
            for node in nodes:
                self._follow(node)

    def holds(self, node: ast.AST | None) -> bool:
        """Whether the expression is a clock time, or one is computed into it."""
        match node:
            case None | ast.Lambda() | ast.Compare() | ast.Constant():
                return False
            case ast.Name(name):
                return name in self.names
            case ast.Attribute(_, attr):
                return attr in self._known.fields | self.fields
            case ast.Subscript(value):
                return self.holds(value)
            case ast.Call(function):
                return self._call_holds(node, function)
        return any(self.holds(child) for child in ast.iter_child_nodes(node))

    def _call_holds(self, call: ast.Call, function: ast.expr) -> bool:
        name = _name_of(function)
        if _reads_clock(function) or name in self._known.functions:
            return True
        if name in ARITHMETIC:
            return any(map(self.holds, call.args))
        return any(map(_is_clock, call.args))

    def _follow(self, node: ast.AST) -> None:
        match node:
            case ast.Assign(targets, value) if self.holds(value):
                self._mark(*_paired(targets, value, self))
            case ast.AnnAssign(target, _, value) | ast.NamedExpr(target, value) if self.holds(value):
                self._mark(target)
            case ast.AugAssign(target, _, value) if self.holds(value):
                self._mark(target)
            case ast.For(target, values) | ast.comprehension(target, values) if self.holds(values):
                self._mark(target)
            case ast.Call(ast.Attribute(receiver, method), arguments) if method in ADDING:
                if any(map(self.holds, arguments)):
                    self._mark(receiver)
            case ast.Call(function, arguments) if (fields := self._fields_of(function)) is not None:
                pairs = [*zip(fields, arguments, strict=False), *((each.arg, each.value) for each in node.keywords)]
                self.fields |= {name for name, value in pairs if name and self.holds(value)}

    def _fields_of(self, function: ast.expr) -> list[str] | None:
        name = _name_of(function)
        return self._known.parameters.get(name) if name[:1].isupper() or name[:2].strip("_")[:1].isupper() else None

    def _mark(self, *targets: ast.expr) -> None:
        for target in targets:
            match target:
                case ast.Name(name):
                    self.names.add(name)
                case ast.Attribute(_, attr):
                    self.fields.add(attr)
                case ast.Subscript(value) | ast.Starred(value):
                    self._mark(value)
                case ast.Tuple(elements) | ast.List(elements):
                    self._mark(*elements)


def _paired(targets: list[ast.expr], value: ast.expr, taint: _Taint) -> list[ast.expr]:
    """The targets that get a clock time: of `begun, count = monotonic(), 0` the first only."""
    match targets, value:
        case [ast.Tuple(names)], ast.Tuple(values) if len(names) == len(values):
            return [name for name, each in zip(names, values, strict=True) if taint.holds(each)]
    return targets


def _is_clock(value: ast.expr) -> bool:
    """Whether the value is a clock itself, which a function is to read."""
    return isinstance(value, ast.Attribute | ast.Name) and _reads_clock(value)


def _reads_clock(function: ast.expr) -> bool:
    match function:
        case ast.Attribute(ast.Name("time"), attr):
            return attr.removesuffix("_ns") in CLOCKS
        case ast.Attribute(ast.Name("datetime"), "now" | "utcnow"):
            return True
        case ast.Name(name):
            return name.removesuffix("_ns") in CLOCKS - {"time"}
    return False


def _name_of(function: ast.expr) -> str:
    match function:
        case ast.Name(name) | ast.Attribute(_, name):
            return name
    return ""


def _learn(scope: ast.Module | Function, known: _Known) -> None:
    """Adds what the scope's functions return, keep in fields, and assert about their parameters."""
    taint = _Taint(scope, known)
    known.fields |= taint.fields
    if isinstance(scope, ast.Module):
        return
    may_hold = _inside(scope).may_hold(known)
    for function in [scope, *(node for node in _inside(scope).followed if isinstance(node, Function))]:
        if may_hold and any(map(taint.holds, _returned(function))):
            known.functions.add(function.name)
        if function.name not in known.called or not _orders(function):
            continue
        for parameter in known.parameters[function.name]:
            if any(_compared(function, _Taint(function, known, [parameter]), known)):
                known.asserted.setdefault(function.name, set()).add(parameter)


@cache
def _returned(function: Function) -> list[ast.expr | None]:
    """What the function itself returns or yields; its inner functions do so for themselves."""
    found: list[ast.expr | None] = []
    waiting: list[ast.AST] = [*function.body]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Return | ast.Yield):
            found.append(node.value)
        if not isinstance(node, Function | ast.Lambda):
            waiting += ast.iter_child_nodes(node)
    return found


@cache
def _orders(function: Function) -> bool:
    """Whether it asserts anything itself: a helper that only calls such a function is not followed."""
    return any(isinstance(node, ast.Assert) for node in _inside(function).followed)


def _findings(tree: ast.Module, known: _Known) -> Iterator[int]:
    for scope in _scopes(tree):
        yield from _compared(scope, _Taint(scope, known), known)


def _compared(scope: ast.Module | Function, taint: _Taint, known: _Known) -> Iterator[int]:
    """The lines at which the scope asserts an order of clock times, or has a function assert it."""
    for node in _inside(scope).followed:
        if isinstance(node, ast.Assert):
            if any(_is_comparison(each, taint) for each in ast.walk(node.test)):
                yield node.lineno
        elif isinstance(node, ast.Call) and any(map(taint.holds, _asserted_arguments(node, known))):
            yield node.lineno


def _is_comparison(node: ast.AST, taint: _Taint) -> bool:
    if not isinstance(node, ast.Compare):
        return False
    operands = [node.left, *node.comparators]
    is_order = any(isinstance(each, ORDER) for each in node.ops)
    return (is_order or any(map(_is_approx, operands))) and any(map(taint.holds, operands))


def _is_approx(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and _name_of(node.func) == "approx"


def _asserted_arguments(call: ast.Call, known: _Known) -> Iterator[ast.expr]:
    name = _name_of(call.func)
    asserted = known.asserted.get(name, set())
    for parameter, value in zip(known.parameters.get(name, []), call.args, strict=False):
        if parameter in asserted:
            yield value
    yield from (each.value for each in call.keywords if each.arg in asserted)
