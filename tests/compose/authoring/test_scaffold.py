"""New packages: they work as they stand, and nothing is overwritten."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from penstock.compose.authoring.check import CheckTarget, check_package
from penstock.compose.authoring.scaffold import write_package
from penstock.compose.authoring.templates import TEMPLATES, Template
from penstock.registry.errors import ConfigurationError, InvalidInput, MissingRequirement
from penstock.registry.package import FORMATS, load_package

CPU = CheckTarget("cpu", 1)


def test_every_format_has_a_template():
    """A format without one would be offered by the command, and fail."""
    assert set(TEMPLATES) == set(FORMATS)


def test_new_function_works_as_it_stands(models_root: Path):
    """Its package passes the check."""
    folder = write_package(models_root, "mine", "1", "python")
    assert sorted(file.name for file in folder.iterdir()) == ["model.py", "model.yaml"]
    assert check_package(folder, CPU, {"x": [[1, 2, 3, 4]]}).outputs["y"].tolist() == [[10.0, 10.0]]
    assert sorted(path.name for path in models_root.iterdir()) == ["mine"]


@pytest.mark.parametrize("kind", ["pytorch", "torchscript", "generate"])
def test_new_package_with_weights_works_as_it_stands(models_root: Path, kind: str, monkeypatch: pytest.MonkeyPatch):
    """make.py writes the weights into its folder, and the package passes the check.

    It runs in this process, which has torch already.
    """
    folder = models_root / "mine" / "1"
    folder.mkdir(parents=True)
    for file, text in TEMPLATES[kind].files.items():
        (folder / file).write_text(text.replace("NAME", "mine").replace("VERSION", "1").replace("FORMAT", kind))
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    try:
        runpy.run_path("make.py", run_name="__main__")
    finally:
        sys.modules.pop("model", None)
    assert check_package(folder, CPU, eval(TEMPLATES[kind].inputs)).forwards >= 1  # noqa: S307 - a text of ours


def test_package_that_is_there_is_not_overwritten(models_root: Path):
    """The refusal names the version, and its files stay as they were."""
    folder = write_package(models_root, "mine", "1", "python")
    (folder / "model.py").write_text("mine\n")
    with pytest.raises(InvalidInput, match=r"^mine/1 is there already\. Expected a new name, or another --version$"):
        write_package(models_root, "mine", "1", "python")
    assert (folder / "model.py").read_text() == "mine\n"
    write_package(models_root, "mine", "2.0-rc1", "python")
    assert load_package(models_root / "mine" / "2.0-rc1").spec.version == "2.0-rc1"


@pytest.mark.parametrize("name", ["on", "007", "1e3", "null", "1.5"])
def test_name_that_yaml_reads_as_something_else_is_quoted(models_root: Path, name: str):
    """The package has the name of its folder."""
    assert load_package(write_package(models_root, name, "1", "python")).spec.name == name


def test_name_that_is_no_name_of_a_model_is_refused(models_root: Path):
    """It would be a folder elsewhere."""
    with pytest.raises(InvalidInput, match="Bad model name"):
        write_package(models_root, "../mine", "1", "python")
    assert list(models_root.iterdir()) == []


def test_framework_that_is_missing_is_named_before_anything_is_written(models_root: Path):
    """The line says what to install, and which format needs nothing."""
    lacking = {"onnx": Template({"model.yaml": ""}, "{}", ("no_such_package",), "onnx,torch")}
    with pytest.raises(MissingRequirement) as refused:
        write_package(models_root, "mine", "1", "onnx", lacking)
    assert str(refused.value) == (
        "no_such_package is not installed, and a package of format onnx needs it. Expected: "
        "pip install '.[onnx,torch]', or --format python"
    )
    assert list(models_root.iterdir()) == []


def test_unfinished_package_lies_where_no_package_is_looked_for(models_root: Path):
    """make.py finds no model.yaml at the depth of a package, so a worker that starts meanwhile does not find one."""
    make = (
        f"from pathlib import Path; Path('seen').write_text(str(list(Path({str(models_root)!r}).glob('*/*/*.yaml'))))"
    )
    folder = write_package(
        models_root, "mine", "1", "onnx", {"onnx": Template({"model.yaml": "", "make.py": make}, "{}")}
    )
    assert (folder / "seen").read_text() == "[]"


def test_weights_that_cannot_be_made_leave_nothing_behind(models_root: Path):
    """The last line of make.py's error is the reason."""
    failing = {"onnx": Template({"model.yaml": "", "make.py": "raise ValueError('no weights')"}, "{}")}
    with pytest.raises(ConfigurationError, match=r"^mine/1: make.py failed \(ValueError: no weights\)\."):
        write_package(models_root, "mine", "1", "onnx", failing)
    assert list(models_root.iterdir()) == []
