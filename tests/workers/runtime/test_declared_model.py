"""Models that `@penstock.model` declares, loaded and run as packages."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package.one_file import read_models, write_packages
from penstock.workers.runtime import Runtime
from tests.workers.runtime.formats import answers, opened
from tests.workers.runtime.jobs import Listener, drained

X = np.arange(8, dtype=np.float32).reshape(2, 4)
HEAD = """
import numpy as np
import penstock
X = {"x": ("float32", ["batch", 4])}
Y = {"y": ("float32", ["batch", 4])}
"""


def served(folder: Path, text: str) -> Runtime:
    """The only model of a file with this text, loaded onto the CPU."""
    file = folder / "my_models.py"
    file.write_text(HEAD + dedent(text))
    app = read_models(file)
    return opened(write_packages(app, folder / "apps") / app.models[0].reference)


def test_function_gets_its_inputs_by_name(tmp_path: Path):
    """Its only output needs no name."""
    runtime = served(tmp_path, "@penstock.model(inputs=X, outputs=Y)\ndef double(x):\n    return x * 2")
    assert answers(runtime, x=X)["y"].tolist() == (X * 2).tolist()


def test_class_is_made_and_loaded_once(tmp_path: Path):
    """`load` comes before the first `predict`, and may take the device."""
    source = """
    @penstock.model(inputs=X, outputs=Y)
    class Plus:
        loads = []
        def load(self, device):
            self.loads.append(device)
        def predict(self, x):
            return {"y": x + len(self.loads) + (self.loads == ["cpu"])}
    """
    runtime = served(tmp_path, source)
    for _ in range(2):
        assert answers(runtime, x=X)["y"].tolist() == (X + 2).tolist()


def test_generator_streams(tmp_path: Path):
    """The context comes to a function that has an argument for it."""
    source = """
    @penstock.model(inputs={"n": ("int64", [1])}, outputs={"total": ("int64", [1])}, streams=True)
    def count(n, ctx):
        for number in range(int(n[0])):
            ctx.progress(number / int(n[0]))
            yield {"value": np.array([number])}
        return {"total": n}
    """
    listener = Listener()
    chunks, outputs = drained(served(tmp_path, source).stream({"n": np.array([2])}, listener))
    assert [chunk["value"].tolist() for chunk in chunks] == [[0], [1]]
    assert (listener.fractions, outputs["total"].tolist()) == ([0.0, 0.5], [2])


def test_class_that_cannot_be_loaded_is_one_line(tmp_path: Path):
    """As for `build()` of any package."""
    source = """
    @penstock.model(inputs=X, outputs=Y)
    class Broken:
        def load(self):
            raise OSError("no weights")
        def predict(self, x): ...
    """
    with pytest.raises(ConfigurationError, match=r"^broken/1: entrypoint my_models:Broken: .*OSError: no weights"):
        served(tmp_path, source)
