"""A test that was skipped in CI was not run: only hardware, the platform and docker excuse one, and they are named."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.servers import ROOT
from tests.sources import nodes

SERVERS = ROOT / "tests" / "servers.py"
EXCUSES = {
    "needs a CUDA device": "few machines have a GPU; the marker is `gpu`",
    "this machine has a GPU": "the test shows what happens without one",
    "this build knows CUDA": "the test shows what happens without one",
    "this machine has no CUDA device": "few machines have a GPU; the marker is `gpu`",
    "this CPU has no units for bf16": "no installation gives it some",
    "this build of torch has no operators for packed weights": "they are private: another build may lack them",
    "this build of torch packs no bf16": "as above",
    "only Linux kills children with their parent": "the promise is made for Linux",
    "only Linux has a class for work that gives way": "other platforms have the niceness alone",
    "this machine mounts no disk in a namespace": "containers often may not; another test injects the full disk",
    "needs Ray Serve": "hundreds of megabytes for one peer; without it, other tests show the same of our classes",
    "needs docker compose": "containers have no docker of their own; the marker is `docker`",
}
"""Why a test may be skipped in CI, too."""


def skips(tree: Iterable[ast.AST]) -> Iterator[str]:
    """What skips a test in this file: the name of pytest's function, or the reason that is given to our own."""
    for node in tree:
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(ast.Name("pytest"), "skip" | "importorskip" | "xfail" as name):
                yield f"pytest.{name}"
            case ast.Attribute(_, "skip" | "xfail" as name):
                yield f"mark.{name}"
            case ast.Attribute(_, "skipif"):
                yield from (_text(each.value) for each in node.keywords if each.arg == "reason")
            case ast.Name("leave_out"):
                yield _text(node.args[0])


def _text(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ast.unparse(node)


def test_only_named_excuses_skip_a_test_in_ci():
    """All others go through `require`, which skips here and fails in CI."""
    found = {
        f"{path.relative_to(ROOT)}: {skip}"
        for path in sorted(Path(ROOT / "tests").rglob("*.py"))
        if path != SERVERS
        for skip in skips(nodes(path))
        if skip not in EXCUSES
    }
    assert found == set()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pytest.skip('needs a unicorn')", "pytest.skip"),
        ("torch = pytest.importorskip('torch')", "pytest.importorskip"),
        ("@pytest.mark.skip(reason='later')\ndef test_it(): ...", "mark.skip"),
        ("@pytest.mark.skipif(True, reason='no unicorn')\ndef test_it(): ...", "no unicorn"),
        ("leave_out('no unicorn')", "no unicorn"),
    ],
)
def test_a_planted_skip_is_found(text: str, found: str):
    """Whichever way it is spelt."""
    assert list(skips(ast.walk(ast.parse(text)))) == [found]
