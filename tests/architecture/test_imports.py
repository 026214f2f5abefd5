"""What an import costs and needs, counted in modules, and that each file is imported under one name."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions, requires
from itertools import pairwise
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.producers.async_client import AsyncClient, AsyncJobHandle
from penstock.producers.client import Client, JobHandle
from tests.conftest import StartWorker
from tests.install import client_calls, only
from tests.packages import write_double
from tests.servers import ROOT, RedisServer
from tests.sources import nodes

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
FOLDERS = ["celeryconfig", "compose", "producers", "registry", "safety", "testing", "workers"]
NOT_FOR_CLIENTS = {"alembic", "celery", "click", "kombu", "onnxruntime", "rich", "sqlalchemy", "torch", "transformers"}
PROGRAMS = {"-A", "-m", "--app"}
IMPORTERS = {"import_module", "find_spec", "run_module", "resolve_name", "importorskip", "patch", "setattr"}


def loaded_after(statement: str) -> set[str]:
    """Every module that a fresh interpreter has after a statement, and has not without it."""
    program = (
        f"import json, sys; before = set(sys.modules); {statement}; print(json.dumps([*{{*sys.modules}} - before]))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return set(json.loads(ended.stdout))


def foreign(modules: set[str]) -> set[str]:
    """The packages of others among them."""
    return {name.partition(".")[0] for name in modules} - set(sys.stdlib_module_names) - {"penstock"}


def required_by(name: str, found: set[str] | None = None) -> set[str]:
    """The distributions that a distribution needs without extras, itself included."""
    found = set() if found is None else found
    found.add(canonicalize_name(name))
    for each in map(Requirement, requires(name) or []):
        if (each.marker is None or each.marker.evaluate({"extra": ""})) and canonicalize_name(each.name) not in found:
            required_by(each.name, found)
    return found


def base_packages() -> set[str]:
    """The names that a process can import after an install without extras."""
    base = {name for each in map(Requirement, PROJECT["dependencies"]) for name in required_by(each.name)}
    base |= {name for each in map(Requirement, PROJECT["dependencies"]) for name in each.extras}
    owners = packages_distributions()
    return {package for package, names in owners.items() if {canonicalize_name(name) for name in names} & base}


def test_importing_the_client_loads_little():
    """NumPy and the codec of headers; Redis, settings and the packages of models come with the first client and job."""
    loaded = loaded_after("from penstock import Client")
    assert foreign(loaded) <= {"msgspec", "numpy", "typing_extensions"}
    own = {name for name in loaded if name.startswith("penstock")}
    assert len(own) <= 29, sorted(own)
    assert not [name for name in own if name.startswith(("penstock.registry.package", "penstock.registry.settings"))]
    assert loaded & {"asyncio", "yaml", "email", "importlib.metadata", "redis", "pydantic", "sqlite3"} == set()


def test_importing_the_async_client_prepares_the_loop():
    """Redis, settings and specs are imported beside it: their time must not be spent inside of a running loop."""
    loaded = loaded_after("from penstock import AsyncClient")
    assert foreign(loaded) & NOT_FOR_CLIENTS == set()
    assert {"redis.asyncio", "penstock.registry.settings", "penstock.registry.package.spec"} <= loaded


@pytest.mark.parametrize("kind", [Client, JobHandle, AsyncClient, AsyncJobHandle], ids=lambda kind: kind.__name__)
def test_every_call_is_in_the_program(kind: type):
    """A new public method of a client is called there, too."""
    tree = ast.parse(inspect.getsource(client_calls))
    called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    methods = {name for name, value in vars(kind).items() if not name.startswith("_") and inspect.isroutine(value)}
    assert methods - {"receive", "from_env"} <= called


def test_submitting_needs_the_base_install_only(
    redis_server: RedisServer, start_worker: StartWorker, tmp_path: Path, models_root: Path
):
    """Every call of both clients works where no other package can be imported, and each base package is used."""
    write_double(models_root, "served")
    worker = start_worker(redis_server, models_root, models=["served"])
    write_double(models_root, "local")
    config = tmp_path / "settings.yaml"
    config.write_text("timeout_seconds: 20\n")
    base = base_packages()
    environment = {
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_CONFIG": str(config),
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "PENSTOCK_INFERENCE_REPO_ROOT": str(models_root),
        "PENSTOCK_REDIS_URL": redis_server.url,
    }
    command = [sys.executable, only.__file__, ",".join({"penstock", *base}), client_calls.__file__, "served", "local"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=100, check=False
    )
    assert ended.returncode == 0, f"{ended.stderr}\n{worker.tail()}"
    assert ended.stdout == "12\n"
    names = {canonicalize_name(name) for name in ("msgspec", "numpy", "pydantic", "pyyaml", "redis")}
    assert {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]} == names
    assert {"hiredis", "msgspec", "numpy", "pydantic", "redis", "yaml"} <= set(ended.stderr.split("\n")[-2].split())


def test_a_missing_package_is_noticed(tmp_path: Path):
    """The process of the test above really cannot import a package that is not named."""
    program = tmp_path / "program.py"
    program.write_text("import click\n")
    ended = subprocess.run([sys.executable, only.__file__, "penstock", program], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "No module named 'click'" in ended.stderr


def old_names(tree: Iterable[ast.AST]) -> list[str]:
    """Where a Python source imports a folder of ours without `penstock.`, by statement or by a string.

    >>> old_names(ast.walk(ast.parse("import workers.app")))
    ['1: workers.app']
    """
    return [f"{line}: {name}" for line, name in _imported(tree) if name.partition(".")[0] in FOLDERS]


def _imported(tree: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    for node in tree:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.lineno, node.module
        elif isinstance(node, ast.Call):
            yield from _called_with(node)
        elif isinstance(node, ast.List | ast.Tuple):
            yield from _in_a_command(node)


def _called_with(call: ast.Call) -> Iterator[tuple[int, str]]:
    """The first argument of import_module and its like."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if function in IMPORTERS and call.args and isinstance(text := getattr(call.args[0], "value", None), str):
        yield call.lineno, text.partition(":")[0]


def _in_a_command(words: ast.List | ast.Tuple) -> Iterator[tuple[int, str]]:
    """The word behind -m or -A; also whole programs behind -c."""
    texts = [getattr(word, "value", None) for word in words.elts]
    for option, text in pairwise(texts):
        if option in PROGRAMS and isinstance(text, str):
            yield words.lineno, text.partition(":")[0]
        elif option == "-c" and isinstance(text, str) and not text.isdigit():
            yield from ((words.lineno, name) for name in re.findall(r"\b(?:import|from) +([\w.]+)", text))


def python_files() -> list[Path]:
    """Every Python file of the checkout."""
    tops = [ROOT / name for name in (*FOLDERS[1:], "models", "tests")]
    return [
        *ROOT.glob("*.py"),
        *(ROOT / "penstock").glob("*.py"),
        *(path for top in tops for path in top.rglob("*.py")),
    ]


def test_each_file_has_one_name():
    """A module that is imported as `workers.x` and as `penstock.workers.x` would exist twice."""
    found = {str(path.relative_to(ROOT)): old_names(nodes(path)) for path in python_files()}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "planted",
    [
        "import workers.app",
        "from registry import errors",
        "import_module('safety.operator_key')",
        "importlib.import_module('compose.cli')",
        "run([sys.executable, '-m', 'registry.package.schema'])",
        "['celery', '-A', 'workers.app', 'worker']",
        "[python, '-c', 'from producers import Client']",
        "def f():\n    import celeryconfig",
    ],
)
def test_an_old_name_is_found(planted: str):
    """The test above sees each kind of import."""
    single, double = (old_names(ast.walk(ast.parse(text))) for text in (planted, planted.replace("'", '"')))
    assert len(single) == 1
    assert double == single
