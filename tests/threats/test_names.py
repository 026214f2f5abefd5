"""S0.5: names and paths from outside stay names and paths inside: 500 traversals, 0 escapes."""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from penstock import Client
from penstock.registry.errors import ConfigurationError, InvalidInput, PenstockError
from penstock.registry.package import find, load_package, manifest
from penstock.registry.queues import parse_name, record_key
from tests.packages import write_double

_STEPS = ("../", "..\\", "..%2f", "%2e%2e/", "..%c0%af", "..;/", "....//", ".\u200b./", "\uff0e\uff0e/", "./../")
_TARGETS = ("etc/passwd", "secret", "secret/1", "secret/1/model.yaml", "")
_ROOTED = (
    "/etc/passwd",
    "//etc/passwd",
    "\\\\host\\share",
    "C:\\secret",
    "file:///etc/passwd",
    "~root",
    "~/secret",
    "$HOME",
)
_INSIDE = (
    "double/../../secret",
    "double/1/../../../secret",
    "double\0/../secret",
    "double\n",
    "double/",
    "./double",
    "double/.",
)
TRAVERSALS = [
    *(step * depth + target for step, depth, target in itertools.product(_STEPS, range(1, 11), _TARGETS)),
    *_ROOTED,
    *_INSIDE,
    *("", ".", "..", "...", "-", "_", "a" * 65, "A", "é", "a b", "a\tb", "{double}", "double}", "a:b", "*", "?", "[a]"),
]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A models root with `double`, and a package beside it that must stay out of reach."""
    root = tmp_path / "models"
    write_double(root)
    write_double(tmp_path, "secret")
    return root


@pytest.fixture
def opened(root: Path) -> Iterator[list[str]]:
    """Every path that is opened or listed outside of the root while the test runs."""
    seen: list[str] = []
    is_on = True

    def note(event: str, arguments: tuple[object, ...]) -> None:
        if is_on and event in ("open", "os.listdir", "os.scandir") and isinstance(arguments[0], str | os.PathLike):
            path = os.path.realpath(os.fspath(arguments[0]))
            if "secret" in path or path in ("/etc/passwd", "/etc"):
                seen.append(path)

    sys.addaudithook(note)
    yield seen
    is_on = False


def test_there_are_enough_of_them():
    """Five hundred different ones."""
    assert len(set(TRAVERSALS)) >= 500


def test_no_name_escapes_the_models_root(root: Path, opened: list[str]):
    """As a model's name, a version or a tenant: refused, and nothing outside of the root is opened."""
    with Client("redis://127.0.0.1:1/0", timeout_s=0.05, models_root=root) as client:
        for name in TRAVERSALS:
            for ask in (
                lambda name: parse_name("model", name),
                lambda name: parse_name("tenant", name),
                lambda name: find(root, name),
                lambda name: find(root, "double", name),
                lambda name: client.submit(name, {"x": [[1, 2, 3, 4]]}),
            ):
                with pytest.raises((InvalidInput, LookupError)):
                    ask(name)
    assert opened == []


def test_no_job_id_becomes_another_key():
    """As part of a job id: refused, or a key of that model's jobs without anything that has a meaning in a key."""
    for name in TRAVERSALS:
        for job_id in (name, f"double.{name}", f"{name}.x", f"double.x{name}"):
            try:
                key = record_key(job_id)
            except InvalidInput:
                continue
            assert re.fullmatch(r"\{[a-z0-9][a-z0-9._-]*\}:job:[A-Za-z0-9][A-Za-z0-9_:-]*", key), job_id


_SPEC = {
    "name": "double",
    "version": "1",
    "format": "python",
    "entrypoint": "model:build",
    "inputs": [{"name": "x", "dtype": "float32", "shape": ["batch", 4]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}],
}
_ENCODER = {
    **{name: _SPEC[name] for name in ("name", "version", "outputs")},
    "format": "transformers",
    "inputs": [{"name": "x", "dtype": "string", "shape": ["batch"]}],
}


_SOURCE: dict[str, dict[str, str]] = {
    "path": {},
    "package": {},
    "hub": {"revision": "0" * 40},
    "revision": {"hub": "org/name"},
}
"""What a source needs beside each of its fields."""


def _package(root: Path, field: str, value: str) -> Path:
    """The folder of `double`, with one field of its model.yaml from outside."""
    if field in _SOURCE:
        spec: dict[str, object] = {**_ENCODER, "source": {**_SOURCE[field], field: value}}
    elif field == "weights":
        spec = {**_SPEC, "format": "pytorch", "weights": value}
    elif field == "files":
        spec = {**_SPEC, "files": {value: "0" * 64}}
    else:
        spec = {**_SPEC, field: f"{value}:build" if field == "entrypoint" else value}
    folder = root / "double" / "1"
    (folder / "model.yaml").write_text(json.dumps(spec))
    return folder


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["each fifth", "all"])
@pytest.mark.parametrize(
    "field", ["entrypoint", "files", "hub", "name", "package", "path", "revision", "version", "weights"]
)
def test_no_field_of_a_package_leaves_its_folder(
    field: str, step: int, root: Path, opened: list[str], monkeypatch: pytest.MonkeyPatch
):
    """Entry point, files, weights, where they come from, name and version: refused, or inside of the folder."""
    inside = (root / "double" / "1").resolve()
    monkeypatch.setenv("HF_HUB_CACHE", str(root / "double" / "1"))
    # These files do not change while they are hashed.
    monkeypatch.setattr(manifest, "_CLOCK_TICK_NS", 0)
    escapes = []
    for value in TRAVERSALS[::step]:
        folder = _package(root, field, value)
        with suppress(ConfigurationError):
            package = load_package(folder)
            found = package.source_folder() if field in _SOURCE else package.weights_file() or package.folder
            package.manifest()
            if not found.resolve().is_relative_to(inside):
                escapes.append(value)
    assert escapes == []
    assert opened == []


def test_links_out_of_a_package_are_refused(root: Path, tmp_path: Path, opened: list[str]):
    """A module or a folder of weights that is a link to somewhere else."""
    folder = _package(root, "entrypoint", "linked")
    (folder / "linked.py").symlink_to(tmp_path / "secret" / "1" / "model.py")
    with pytest.raises(ConfigurationError, match="expected a module inside the package"):
        load_package(folder)
    folder = _package(root, "path", "weights")
    (folder / "weights").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigurationError, match="expected a folder inside the package"):
        load_package(folder).source_folder()
    assert opened == []


def test_errors_show_no_path_of_the_machine(root: Path):
    """What a client sees names the package, not where it lies."""
    for field, value in (("entrypoint", "../x"), ("path", "../x"), ("name", "../x"), ("weights", "../x")):
        with pytest.raises(PenstockError) as refused:
            load_package(_package(root, field, value)).source_folder()
        assert str(root) not in str(refused.value)
