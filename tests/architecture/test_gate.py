"""No code path switches an optimisation on without an accepted decision of the gate (AR-013)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import ROOT
from tests.sources import parsed

SHIPPED = ("compose", "producers", "registry", "safety", "testing", "workers")
OPTIMIZER = "workers/levels/optimizer.py"
GATE = "safety/orchestrator.py"

Call = tuple[str, str, str]
"""A file, the function around the call, and the called name."""


def calls(root: Path) -> Iterator[Call]:
    """Every call and every assignment to an attribute of the product that matters here."""
    for file in sorted(path for room in SHIPPED for path in (root / room).rglob("*.py")):
        name = file.relative_to(root).as_posix()
        yield from ((name, around, what) for around, what in _of(parsed(file), ""))


def _of(tree: ast.AST, around: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else around
        if isinstance(node, ast.Call) and (what := _switch(node)):
            yield around, what
        yield from _of(node, inside)


def _switch(call: ast.Call) -> str:
    """The name of a call that can switch an optimisation on; empty for all others."""
    called = ast.unparse(call.func)
    name = called.rpartition(".")[2]
    if name == "use" and "forms" in called:
        return "Forms.use"
    if name == "use_pool":
        # One thread is no pool: it switches the pool off.
        return "" if [ast.unparse(each) for each in call.args] == ["1"] else "Tokeniser.use_pool"
    return name if name in {"TokenCache", "_turn_on", "GateDecision", "gate_optimization"} else ""


ALLOWED = {
    (OPTIMIZER, "_turn_on", "Forms.use"),
    (OPTIMIZER, "_turn_on", "Tokeniser.use_pool"),
    (OPTIMIZER, "_turn_on", "TokenCache"),
    # A cache for one comparison, which serves no job.
    ("workers/runtime/tokeniser.py", "cache_agreement", "TokenCache"),
    (OPTIMIZER, "_take", "_turn_on"),
    ("workers/levels/decision_recorder.py", "gated", "gate_optimization"),
    # The verdict of a canary, which switches nothing on.
    ("compose/canary_gate.py", "record_verdict", "gate_optimization"),
    (GATE, "gate_optimization", "GateDecision"),
    (GATE, "disable_optimization", "GateDecision"),
}


def test_every_switch_is_behind_the_gate():
    """Forms, the tokenizer's pool and its cache are switched on in one function, which needs a decision of the gate.

    Only the gate makes decisions, and only the optimizer and the canary ask it. A new call of one of these names
    is a new path.
    """
    assert set(calls(ROOT)) == ALLOWED


def test_the_switch_is_thrown_after_an_accepted_decision_only():
    """In `_take`, the call stands in the branch of an accepted decision, and that function gets the decision."""
    tree = parsed(ROOT / OPTIMIZER)
    (take,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_take")
    branches = [node for node in ast.walk(take) if isinstance(node, ast.If) and "_turn_on" in ast.unparse(node.body[0])]
    assert [ast.unparse(branch.test) for branch in branches] == ["gate.accepted"]
    assert ast.unparse(branches[0].body[0]) == "_turn_on(version.runtime, gate, trial.forward)"


@pytest.mark.parametrize(
    "line",
    [
        "runtime.forms.use('int8', forward)",
        "self._tokeniser.use_pool(4)",
        "tokeniser.cache = TokenCache(1, 1)",
        "_turn_on(runtime, decision, None)",
        "GateDecision('int8', subject)",
    ],
)
def test_a_way_around_the_gate_is_found(tmp_path: Path, line: str):
    """The check fails for each of the switches in another function."""
    (tmp_path / "workers").mkdir()
    (tmp_path / "workers" / "bypass.py").write_text(f"def bypass():\n    {line}\n    forms.reset('off')\n")
    assert len(list(calls(tmp_path))) == 1
