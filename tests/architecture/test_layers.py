"""Who may import whom: the contracts in pyproject.toml hold, and they can fail."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers import ROOT
from tests.sources import nodes

FRAMEWORKS = {"onnxruntime", "torch", "transformers"}
PACKAGES = ["compose", "producers", "registry", "safety", "testing", "workers"]


def run_contracts(checkout: Path) -> subprocess.CompletedProcess[str]:
    """import-linter over a checkout."""
    program = Path(sys.executable).parent / "lint-imports"
    return subprocess.run([program, "--no-cache"], cwd=checkout, capture_output=True, text=True)


def imported(source: Path) -> Iterator[str]:
    """Top-level names that a file imports, wherever in it."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def test_imports_only_point_down():
    """The layers, the frameworks and the dashboards are where DESIGN puts them."""
    checked = run_contracts(ROOT)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("module", "line", "broken"),
    [
        ("registry/queues.py", "import penstock.producers", "Imports only point down"),
        ("producers/__init__.py", "import penstock.workers", "Imports only point down"),
        ("workers/__init__.py", "import penstock.compose", "Imports only point down"),
        ("producers/__init__.py", "import torch", "loads no framework"),
        ("workers/__init__.py", "import flower", "does not import dashboards"),
        ("producers/gateway/websocket.py", "import penstock.producers.gateway.jobs", "imports another one"),
        ("producers/gateway/oip_terms.py", "import penstock.producers.gateway.openai_texts", "one of OpenAI's"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, module: str, line: str, broken: str):
    """Each contract catches the import that it is there for."""
    for folder in (*PACKAGES, "penstock"):
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "celeryconfig.py", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / module).open("a") as source:
        source.write(f"\n{line}\n")
    checked = run_contracts(tmp_path)
    assert checked.returncode == 1, checked.stdout
    assert any(broken in text and "BROKEN" in text for text in checked.stdout.splitlines()), checked.stdout


def test_contracts_of_protocols_name_every_module():
    """Those with routes, and all of OpenAI's. A model's control is no protocol, and other protocols show the health."""
    gateway = ROOT / "producers" / "gateway"
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (independent,) = (each["modules"] for each in contracts if "imports another one" in each["name"])
    (forbidden,) = (each["forbidden_modules"] for each in contracts if "one of OpenAI's" in each["name"])
    named = {name.rpartition(".")[2] for name in (*independent, *forbidden)}
    with_routes = {file.stem for file in gateway.glob("*.py") if "def routes(self)" in file.read_text()}
    assert {file.stem for file in gateway.glob("openai*.py")} <= named
    assert with_routes - named == {"health", "model_control"}


@pytest.mark.parametrize("package", ["producers", "registry", "safety"])
def test_no_framework_is_imported_even_lazily(package: str):
    """A backend that only submits jobs installs no framework, so no function of these packages imports one."""
    users = [
        f"{source.relative_to(ROOT)} imports {name}"
        for source in (ROOT / package).rglob("*.py")
        for name in imported(source)
        if name in FRAMEWORKS
    ]
    assert users == []
