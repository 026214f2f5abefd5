"""The project file: what it must name, and that the pinned versions fit its ranges."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests.servers import ROOT

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


def test_project_says_who_it_is():
    """Name, versions of Python, the command, and that it is not to be uploaded."""
    assert PROJECT["name"] == "penstock"
    assert PROJECT["requires-python"] == ">=3.11"
    assert PROJECT["scripts"] == {"penstock": "penstock.compose.cli:main"}
    assert "Private :: Do Not Upload" in PROJECT["classifiers"]


@pytest.mark.parametrize("extra", ["demo", "dev", "flower", "torch"])
def test_extra_exists(extra: str):
    """What README and Makefile install by name is there."""
    assert EXTRAS[extra]


def test_submitting_needs_no_framework():
    """The frameworks are extras, never plain dependencies."""
    names = {canonicalize_name(Requirement(text).name) for text in PROJECT["dependencies"]}
    assert names & {"torch", "transformers", "onnxruntime", "flower"} == set()


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
