"""Models of one Python file: read without running it, and refused with file and line."""

from __future__ import annotations

import runpy
from pathlib import Path
from textwrap import dedent

import pytest

import penstock
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.package import discover, load_package
from penstock.registry.package.declaration import tensor_fields
from penstock.registry.package.one_file import read_models, write_packages

WHOLE = """
import sys
import penstock as p
from penstock import model as served

raise SystemExit("this file is read, and never run")

WIDTH = 4
X = {"x": ("float32", ["batch", WIDTH])}

@p.model(inputs=X, outputs={"y": ("float32", ["batch"])}, batching={"max_batch_size": 8}, fields={"timeout_s": 5})
def total(x):
    return x.sum(axis=1)

@served(inputs=[{"name": "x", "dtype": "float32", "shape": ["batch", 4]}], outputs=X, name="linear", version=2)
class Model:
    def load(self): ...
    def predict(self, x): ...

@p.model(inputs={"n": ("int64", [1])}, outputs={}, streams=True)
def count(ctx, n):
    yield {"i": n}

def undeclared(x): ...
"""


def app(folder: Path, text: str, name: str = "my_models.py") -> Path:
    """A file with this text."""
    file = folder / name
    file.write_text(dedent(text))
    return file


def test_models_are_read_from_functions_and_classes(tmp_path: Path):
    """Names, versions and all fields come from the decorator, however it was imported; the file does not run."""
    read = read_models(app(tmp_path, WHOLE))
    assert [(each.reference, each.line) for each in read.models] == [("total/1", 12), ("linear/2", 16), ("count/1", 21)]
    root = write_packages(read, tmp_path / "apps")
    specs = {ref.name: load_package(ref.path).spec for ref in discover(root)}
    total, linear, count = specs["total"], specs["linear"], specs["count"]
    assert (total.inputs[0].shape, total.batching.max_batch_size, total.timeout_s) == (("batch", 4), 8, 5)
    assert (linear.entrypoint, linear.version, linear.outputs[0].name) == ("my_models:Model", "2", "x")
    assert (count.streams, count.outputs) == (True, ())


def test_content_hash_is_that_of_the_files_bytes_name_and_version(tmp_path: Path):
    """Equal files have equal packages wherever they lie; a changed byte has others, and the old ones stay."""
    text = WHOLE.partition("@served")[0]
    folders = []
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        folders.append(write_packages(read_models(app(tmp_path / place, text)), tmp_path / place / "apps"))
    hashes = [load_package(root / "total" / "1").manifest().content_hash for root in folders]
    assert hashes[0] == hashes[1]
    again = write_packages(read_models(app(tmp_path / "one", text + "\n# changed\n")), tmp_path / "one" / "apps")
    assert again != folders[0]
    assert load_package(again / "total" / "1").manifest().content_hash != hashes[0]
    assert load_package(folders[0] / "total" / "1").manifest().content_hash == hashes[0]


def test_package_that_was_changed_is_written_again(tmp_path: Path):
    """The packages hold the bytes of the file, also when another program wrote into their folder."""
    read = read_models(app(tmp_path, WHOLE))
    root = write_packages(read, tmp_path / "apps")
    (root / "total" / "1" / "my_models.py").write_text("other\n")
    assert write_packages(read, tmp_path / "apps") == root
    assert (root / "total" / "1" / "my_models.py").read_bytes() == read.data


_HEAD = 'import penstock\nX = {"x": ("float32", ["batch"])}\n'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("def broken(:\n", "my_models.py, line 1: not valid Python (invalid syntax)"),
        ("x = 1\n", "my_models.py: found no model, expected @penstock.model(inputs=..., outputs=...) over a function"),
        (_HEAD + "@penstock.model\ndef f(x): ...\n", "my_models.py, line 3: expected @penstock.model(inputs=..., outp"),
        (
            _HEAD + "@penstock.model(X, X)\ndef f(x): ...\n",
            "my_models.py, line 3: expected @penstock.model(inputs=..., ",
        ),
        (_HEAD + "@penstock.model(inputs=X)\ndef f(x): ...\n", "my_models.py, line 3: f: outputs: missing, expected a"),
        (
            _HEAD + "@penstock.model(inputs=X, outputs=X, size=3)\ndef f(x): ...\n",
            "my_models.py, line 3: size: unknown argument, expected one of: batching, fields, inputs, name, outputs, ",
        ),
        (
            _HEAD + "@penstock.model(inputs=X,\n  outputs=make())\ndef f(x): ...\n",
            "my_models.py, line 4: outputs: found an expression, expected literals, or constants of this file",
        ),
        (
            _HEAD + "LOOP = [LOOP]\n@penstock.model(inputs=LOOP, outputs=X)\ndef f(x): ...\n",
            "my_models.py, line 4: inputs: found LOOP, whose value is not certain here, expected literals",
        ),
        (
            _HEAD + "@penstock.model(inputs=X, outputs={'y': ('f4', ['batch'])})\ndef f(x): ...\n",
            "my_models.py, line 3: f: outputs[0].dtype: found 'f4', expected one of: ",
        ),
        (
            _HEAD + "@penstock.model(inputs=X, outputs={'y': 'float32'})\ndef f(x): ...\n",
            "my_models.py, line 3: f: outputs: 'y': found str, expected a dtype and a shape: ",
        ),
        (
            _HEAD + "@penstock.model(inputs=X, outputs=X, fields={'format': 'onnx'})\ndef f(x): ...\n",
            "my_models.py, line 3: f: fields: found format, expected further fields of model.yaml",
        ),
        (
            _HEAD + "@penstock.model(inputs=X, outputs=X)\ndef f(z): ...\n",
            "my_models.py, line 4: f: takes z, expected x",
        ),
        (
            _HEAD + "X['x']\n@penstock.model(inputs=[{'name': 'x', 'dtype': 'int8', 'shape': ['batch']}, {'name': 'm', "
            "'dtype': 'int8', 'shape': ['batch'], 'optional': True}], outputs=X)\ndef f(m, x=1): ...\n",
            "my_models.py, line 5: f: found no default for m, expected one: it is optional",
        ),
        (
            _HEAD + "@penstock.model(inputs=X, outputs=X)\nclass F:\n  def predict(self): ...\n",
            "my_models.py, line 5: F: takes nothing, expected x",
        ),
        (
            _HEAD + "@penstock.model(inputs=X, outputs=X)\nclass F:\n  def load(self): ...\n",
            "my_models.py, line 4: F: found no method predict, expected predict(self, ...) with the inputs",
        ),
        (
            _HEAD + "@penstock.model(inputs=X, outputs=X)\nasync def f(x): ...\n",
            "my_models.py, line 4: f: found an async function, expected def",
        ),
        (
            _HEAD + "@penstock.model(inputs=X, outputs=X)\ndef f(x): ...\n" * 2,
            "my_models.py, line 6: f/1 is also on line 4",
        ),
        (
            _HEAD + "@penstock.model(inputs=X, outputs=X, name='Bad name')\ndef f(x): ...\n",
            "my_models.py, line 3: f: name: Bad model name 'Bad name'",
        ),
    ],
)
def test_mistake_is_named_with_file_and_line(tmp_path: Path, text: str, problem: str):
    """The author sees where it is, before a worker starts."""
    with pytest.raises(ConfigurationError) as refused:
        read_models(app(tmp_path, text))
    assert str(refused.value).startswith(problem)


_BODY = "('float32', ['batch', 2])"
_DECLARED = "@penstock.model(inputs=D, outputs={'y': ('float32', ['batch'])})\ndef f(**inputs): ...\n"


@pytest.mark.parametrize(
    "text",
    [
        "N = 2\nD = {'x': ('float32', ['batch', N])}\nN = 8\n",
        "N = 2\nN = 3\nD: dict = {'x': ('float32', ['batch', N])}\nif N: N = 4\n",
        f"D = E = {{'x': {_BODY}}}\n",
        f"D = {{'x': {_BODY}}}\ndef helper(D): D['z'] = 1\ndef other():\n  D = {{}}\n  D['z'] = 1\n",
        f"D = {{'x': {_BODY}}}\nclass Other:\n  D = 1\n",
        f"D = {{'x': {_BODY}}}\nNAMES = [D for D in range(3)]\nprint(D, D['x'])\nassert D.keys()\n",
        "S = ['batch', 2]\nD = [{'name': 'x', 'dtype': 'float32', 'shape': S}, "
        "{'name': 'z', 'dtype': 'float32', 'shape': S}]\nS = 3\nS += 1\n",
        f"D = {{'x': {_BODY}}}\nE = [1]\nE.append(2)\ndef helper(f=lambda D: D.clear()): return D\n",
    ],
)
def test_constant_has_its_value_of_the_line_that_uses_it(tmp_path: Path, text: str):
    """The signature is that of the running file."""
    file = app(tmp_path, f"import penstock\n{text}{_DECLARED}")
    read = read_models(file)
    expected = tensor_fields("inputs", runpy.run_path(str(file))["D"])
    assert read.models[0].document["signature"]["inputs"] == expected
    folder = write_packages(read, tmp_path / "apps") / "f" / "1"
    assert [one.name for one in load_package(folder).spec.inputs] == [each["name"] for each in expected]
    # Two names of one list are no anchors there.
    assert "&" not in (folder / "model.yaml").read_text()


@pytest.mark.parametrize(
    "change",
    [
        "D |= {'z': 1}",
        "D['z'] = 1",
        "D['x'][1][1]: int = 3",
        "D['x'][1][1] += 1",
        "del D['x']",
        "del D",
        "D.update(z=1)",
        "D.get('x')[1].append(3)",
        "D.__setitem__('z', 1)",
        "z = D.pop('x')",
        "fill(D)",
        "if True: D = {}",
        "for D in (1, 2): pass",
        "for each in (D,): each['z'] = 1",
        "[each.clear() for each in (D,)]",
        "while (D := {}): pass",
        "with open('f') as D: pass",
        "try: pass\nexcept ValueError as D: pass",
        "match 1:\n  case D: pass",
        "match [1]:\n  case [*D]: pass",
        "match {}:\n  case {**D}: pass",
        "D, z = {}, 1",
        "z = (D := {})",
        "import os as D",
        "from os import *",
        "from os import path as D",
        "def D(): pass",
        "class D: pass",
        "def g():\n  global D\n  D = {}",
        "def g(): D['z'] = 1",
        "class G:\n  D['z'] = 1",
        "E = D\nE['z'] = 1",
        "E = [D]\nE[0].clear()",
        "E = D if True else {}\nE.clear()",
        "globals()['D'] = {}",
        "exec('D = {}')",
    ],
)
def test_name_that_the_file_changes_is_no_constant(tmp_path: Path, change: str):
    """It is refused with its line; its first value could be another than that of the running file."""
    text = f"import penstock\nD = {{'x': {_BODY}}}\n{change}\n{_DECLARED}"
    line = 4 + change.count("\n")
    with pytest.raises(ConfigurationError) as refused:
        read_models(app(tmp_path, text))
    assert str(refused.value) == (
        f"my_models.py, line {line}: inputs: found D, whose value is not certain here, expected literals, or constants "
        "of this file"
    )


def test_file_that_is_no_module_is_refused(tmp_path: Path):
    """Its name becomes that of a module in the package."""
    for name, problem in (
        ("my-models.py", "my-models.py: expected the name of a Python module, such as my_models.py"),
        ("models.txt", "models.txt: expected the name of a Python module, such as my_models.py"),
    ):
        with pytest.raises(ConfigurationError) as refused:
            read_models(app(tmp_path, "", name))
        assert str(refused.value) == problem
    with pytest.raises(ConfigurationError, match=r"^absent\.py: cannot be read \(No such file or directory\)"):
        read_models(tmp_path / "absent.py")


def test_declared_function_is_called_as_before():
    """The decorator changes nothing: tests of the author call the function."""

    @penstock.model(inputs={"x": ("float32", ["batch"])}, outputs={"y": ("float32", ["batch"])})
    def double(x):
        return x * 2

    assert double(21) == 42
    with pytest.raises(InvalidInput, match=r"^inputs: found str, expected a mapping such as"):
        penstock.model(inputs="x", outputs={})  # type: ignore[arg-type]
