"""Models of one Python file: read without running it, and refused with file and line."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest

import penstock
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.package import discover, load_package
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
            "my_models.py, line 4: inputs: found an expression, expected literals",
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
