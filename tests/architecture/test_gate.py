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
GENERATION = "workers/generation"
RUNTIME = "workers/runtime"
GATED = {"TokenCache", "_turn_on", "GateDecision", "gate_optimization"}
BUILDS = {"pack_linears", "prepack", "join_linears", "choose_kernel", "CompiledDecoding", "DecodeGraphs"}
"""What makes a model faster, and must be put in use by the gate alone."""
TORCH = {"compile", "CUDAGraph", "graph", "make_graphed_callables"}
"""The same of torch. Nobody imports them by their names, so that the module in front of them tells what they are."""

Call = tuple[str, str, str]
"""A file, the function around the call, and the called name."""


def calls(root: Path) -> Iterator[Call]:
    """Every call, assignment and import of the product that can switch an optimisation on."""
    for file in sorted(path for room in SHIPPED for path in (root / room).rglob("*.py")):
        name = file.relative_to(root).as_posix()
        yield from ((name, around, what) for around, what in _of(parsed(file), ""))


def _of(tree: ast.AST, around: str) -> Iterator[tuple[str, str]]:
    for node in ast.iter_child_nodes(tree):
        inside = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else around
        if what := _switch(node):
            yield around, what
        yield from _of(node, inside)


def _switch(node: ast.AST) -> str:
    """The name of what can switch an optimisation on; empty for all others."""
    if isinstance(node, ast.Call):
        return _called(node)
    if isinstance(node, ast.Attribute):
        # Without a call, too: it may be called by another name.
        return _of_torch(node)
    if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
        return next((f"import {one.name}" for one in node.names if one.name in TORCH), "")
    if isinstance(node, ast.Assign):
        return next((f"= {each}" for target in node.targets if (each := _assigned(target, node.value))), "")
    return ""


def _of_torch(node: ast.Attribute) -> str:
    base = ast.unparse(node.value)
    if node.attr == "compile":
        return "" if base in ("re", "re2") else f"{base}.compile"
    # Other modules have graphs, too.
    is_graph = node.attr in TORCH and (node.attr != "graph" or base.endswith("cuda"))
    return f"cuda.{node.attr}" if is_graph else ""


def _called(call: ast.Call) -> str:
    called = ast.unparse(call.func)
    name = called.rpartition(".")[2]
    if name == "use" and "forms" in called:
        return "Forms.use"
    if name == "use_pool":
        # One thread is no pool: it switches the pool off.
        return "" if [ast.unparse(each) for each in call.args] == ["1"] else "Tokeniser.use_pool"
    return name if name in GATED | BUILDS else ""


def _assigned(target: ast.AST, value: ast.expr) -> str:
    """The kernel of a decoder and the graphs of its forwards, but for None, which switches them off."""
    is_off = isinstance(value, ast.Constant) and value.value is None
    is_switch = isinstance(target, ast.Attribute) and target.attr in ("kernel", "graphs")
    return target.attr if isinstance(target, ast.Attribute) and is_switch and not is_off else ""


ALLOWED = {
    # The one question of an engine.
    (f"{GENERATION}/acceleration_gate.py", "accepts", "gate_optimization"),
    # Each of these is used for a trial, and after it where the gate says; see the tests of tests/workers/generation.
    (f"{GENERATION}/accelerations.py", "_joined", "join_linears"),
    (f"{GENERATION}/accelerations.py", "proof_with_kernel", "choose_kernel"),
    (f"{GENERATION}/accelerations.py", "proof_with_kernel", "= kernel"),
    (f"{GENERATION}/packing.py", "_compared", "pack_linears"),
    (f"{GENERATION}/packing.py", "_tried", "pack_linears"),
    (f"{GENERATION}/graph_trial.py", "_accepted_compiled", "CompiledDecoding"),
    (f"{GENERATION}/graph_trial.py", "accepted_graphs", "DecodeGraphs"),
    # Layers that the gate has accepted.
    (f"{GENERATION}/packing.py", "_pack", "pack_linears"),
    (f"{GENERATION}/forwards.py", "try_graphs", "= graphs"),
    # The parts of the above.
    (f"{GENERATION}/compiled_decoding.py", "__init__", "torch.compile"),
    (f"{GENERATION}/decode_graphs.py", "", "cuda.CUDAGraph"),
    (f"{GENERATION}/decode_graphs.py", "_captured", "cuda.CUDAGraph"),
    (f"{GENERATION}/decode_graphs.py", "_captured", "cuda.graph"),
    # Forms of a model, which are in use from `Forms.use` on.
    (f"{RUNTIME}/prepacked.py", "prepack", "pack_linears"),
    (f"{RUNTIME}/unpadded.py", "__init__", "pack_linears"),
    (f"{RUNTIME}/pytorch.py", "_reduced_forward", "prepack"),
    (f"{RUNTIME}/pytorch.py", "_prepacked", "prepack"),
    (f"{RUNTIME}/pytorch.py", "_compiled", "compiler.compile"),
    (f"{RUNTIME}/transformers.py", "_prepacked", "prepack"),
    (f"{RUNTIME}/transformers.py", "_reduced_on_cpu", "prepack"),
    (f"{RUNTIME}/transformers.py", "_compiled", "compiler.compile"),
    ("workers/compilation/cuda_graphs.py", "__init__", "cuda.CUDAGraph"),
    ("workers/compilation/cuda_graphs.py", "__init__", "cuda.graph"),
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

    What makes an engine faster is built and used in the few functions that ask the gate, or that these call. Only the
    gate makes decisions, and only the optimizer, the canary and the engine ask it. A new call of one of these names
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
        "orchestrator.gate_optimization('int8', subject, evidence)",
        "torch.compile(model)",
        "fast = torch.compile",
        "model.compile()",
        "from torch import compile as fast",
        "prepacked.pack_linears(layers)",
        "prepack(module)",
        "join_linears(model)",
        "graph = torch.cuda.CUDAGraph()",
        "from torch.cuda import CUDAGraph",
        "capture = self._torch.cuda.graph",
        "torch.cuda.make_graphed_callables(model, given)",
        "choose_kernel('auto', device)",
        "decoder.kernel = kernel",
        "self.graphs = made",
        "graphs = DecodeGraphs(decoder, pools)",
        "CompiledDecoding(decoder, pools, gate)",
    ],
)
def test_a_way_around_the_gate_is_found(tmp_path: Path, line: str):
    """The check fails for each of the switches in another function, and for nothing that switches one off."""
    (tmp_path / "workers").mkdir()
    off = "forms.reset('off'); decoder.kernel = None; self.graphs = None; re.compile('x'); tokeniser.use_pool(1)"
    (tmp_path / "workers" / "bypass.py").write_text(f"def bypass():\n    {line}\n    {off}\n")
    assert len(list(calls(tmp_path))) == 1


def branches_of(file: str, function: str, test: str) -> list[tuple[ast.If, list[ast.stmt]]]:
    """The branches of a function whose condition has this text, each with the statements behind it in its block."""
    (found,) = (
        node for node in ast.walk(parsed(ROOT / file)) if isinstance(node, ast.FunctionDef) and node.name == function
    )
    blocks: list[list[ast.stmt]] = [found.body, *(node.body for node in ast.walk(found) if isinstance(node, ast.If))]
    return [
        (each, block[place + 1 :])
        for block in blocks
        for place, each in enumerate(block)
        if isinstance(each, ast.If) and test in ast.unparse(each.test)
    ]


@pytest.mark.parametrize(
    ("file", "function", "refused"),
    [
        ("packing.py", "_decide", "return"),
        ("accelerations.py", "proof_with_kernel", "decoder.kernel = proof = None"),
    ],
)
def test_a_refused_acceleration_is_not_used(file: str, function: str, refused: str):
    """The first statement after a refusal takes the form away, or ends the function."""
    ((branch, _),) = branches_of(f"{GENERATION}/{file}", function, "gate.accepts(")
    assert isinstance(branch.test, ast.UnaryOp)
    assert isinstance(branch.test.op, ast.Not)
    assert ast.unparse(branch.body[0]) == refused


def test_refused_joined_layers_are_parted():
    """Behind the branch of an accepted decision, which ends the function."""
    ((branch, behind),) = branches_of(f"{GENERATION}/accelerations.py", "joined_weights", "gate.accepts(")
    assert [ast.unparse(branch.body[0]), ast.unparse(behind[0])] == ["return number", "part_linears(decoder.model)"]
