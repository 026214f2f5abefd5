"""What the wheel and the source archive contain: one package, its data files, the licence, and no secret."""

from __future__ import annotations

import tarfile
from collections import Counter
from importlib.metadata import PathDistribution
from pathlib import Path
from zipfile import Path as ZipPath
from zipfile import ZipFile

import pytest

from tests.install.environments import FOLDERS, build
from tests.servers import ROOT

NOT_PYTHON = {".acl", ".conf", ".json", ".lua", ".sh", ".typed", ".yaml", ".yml"}


def shipped() -> set[str]:
    """Every file below the package's folders that a user needs, by its name in the wheel."""
    inside = [name for name in FOLDERS if name not in ("models", "penstock")]
    files = [path for name in inside for path in (ROOT / name).rglob("*") if path.is_file()]
    names = {f"penstock/{path.relative_to(ROOT)}" for path in files if path.suffix in {".py", *NOT_PYTHON}}
    names |= {f"penstock/{path.name}" for path in (ROOT / "penstock").iterdir() if path.is_file()}
    return {name for name in names if "/secrets/" not in name}


@pytest.fixture(scope="module")
def names(wheel: Path) -> list[str]:
    """The names of the files in the wheel."""
    return ZipFile(wheel).namelist()


def test_only_one_name_is_installed(names: list[str]):
    """Nothing but `penstock` lies at the top of site-packages: no `workers`, no `celeryconfig.py`."""
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"penstock"}


def test_each_file_is_there_once(names: list[str]):
    """Every module and every data file of the checkout is in the wheel, under one name."""
    assert [name for name, count in Counter(names).items() if count > 1] == []
    assert shipped() - set(names) == set()
    links = [link.name for link in (ROOT / "penstock").iterdir() if link.is_symlink()]
    assert all(any(name.startswith(f"penstock/{link}") for name in names) for link in links)


def test_no_secret_is_packed(sources: Path, names: list[str], tmp_path: Path):
    """What compose/new-secrets.sh writes lies in the tree that is built, and in no archive."""
    assert (sources / "compose" / ".env").exists()
    with tarfile.open(build(sources, tmp_path, "sdist")) as archive:
        packed = [*names, *archive.getnames()]
    assert [name for name in packed if "/.env" in name or "/secrets" in name] == []


def test_metadata_says_what_is_installed(wheel: Path):
    """Licence with its text, command, plugin for pytest, versions of Python, base requirements without a framework."""
    folder = next(path for path in ZipPath(wheel).iterdir() if path.name.endswith(".dist-info"))
    found = PathDistribution(folder)
    assert found.metadata["License-Expression"] == "Apache-2.0"
    assert found.read_text("licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    entries = {(entry.group, entry.value) for entry in found.entry_points}
    assert entries == {("console_scripts", "penstock.__main__:main"), ("pytest11", "penstock.testing.plugin")}
    base = {text.split(">")[0] for text in found.requires or [] if "extra ==" not in text}
    assert base == {"msgspec", "numpy", "pydantic<3,", "pyyaml", "redis[hiredis]"}


def test_source_archive_makes_the_same_wheel(sources: Path, names: list[str], tmp_path: Path):
    """A wheel from the unpacked source archive has the same files; links in it lead to files that are in it."""
    archive = build(sources, tmp_path, "sdist")
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    unpacked = tmp_path / archive.name.removesuffix(".tar.gz")
    again = ZipFile(build(unpacked, tmp_path, "wheel")).namelist()
    assert sorted(again) == sorted(names)
