"""Strings that two processes share are spelt in one place."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.servers import ROOT
from tests.sources import nodes

SHIPPED = ["compose", "producers", "registry", "safety", "testing", "workers"]
OF_A_MODEL = ("infer.{", "}:job:", "}:idempotency:", "}:reply:", "}:flow", "}:spec", "}:lane")
OF_ALL = ("penstock:worker", "penstock:models")


def literals(source: Path) -> list[str]:
    """The string constants of a file, f-strings joined with `{}` for what they insert; docstrings left out."""
    tree = nodes(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    prose = {
        id(statement.value)
        for node in tree
        if isinstance(node, documented)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    joined = [node for node in tree if isinstance(node, ast.JoinedStr)]
    inside = {id(part) for node in joined for part in node.values}
    found = ["".join(str(p.value) if isinstance(p, ast.Constant) else "{}" for p in node.values) for node in joined]
    found += [
        node.value
        for node in tree
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose | inside
    ]
    return found


def key_literals(source: Path) -> list[str]:
    """Literals of a file that spell a key of Redis, also as the pieces of an f-string around its tag."""
    return [
        text for text in literals(source) if any(part in text.replace("{{}}", "{}") for part in OF_A_MODEL + OF_ALL)
    ]


def test_key_names_are_spelt_in_one_module():
    """Only registry/queues.py knows how a key of the broker is called."""
    strangers = {
        f"{source.relative_to(ROOT)}: {text}"
        for top in SHIPPED
        for source in (ROOT / top).rglob("*.py")
        if source != ROOT / "registry" / "queues.py"
        for text in key_literals(source)
    }
    assert strangers == set()


def test_a_misplaced_key_name_is_found(tmp_path: Path):
    """The check sees plain strings and f-strings, and does not take prose for names."""
    source = tmp_path / "module.py"
    source.write_text('"""Reads infer.{minilm}.high."""\nkey = f"{{{slot}}}:job:{local}"\nother = "infer.{a}.low"\n')
    assert len(key_literals(source)) == 2


def logger_names(source: Path) -> list[str]:
    """The constant names of loggers that a file asks for."""
    return [
        node.args[0].value
        for node in nodes(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "getLogger"
        if node.args and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)
    ]


def test_loggers_are_one_family():
    """A program sets the level of all of them by the name `penstock`, and none clashes with its own."""
    found = {name for top in SHIPPED for source in (ROOT / top).rglob("*.py") for name in logger_names(source)}
    assert {"penstock.client", "penstock.runtime", "penstock.server"} <= found
    assert {name for name in found if name.partition(".")[0] != "penstock"} == set()
