"""Packages of plain Python: batched and streaming entry points, and those that cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from penstock.registry.errors import ConfigurationError, ModelError
from penstock.workers.runtime import Runtime
from penstock.workers.runtime.python_entrypoint import PythonRuntime
from tests.packages import write_package
from tests.servers import ROOT
from tests.workers.runtime.formats import answers, opened
from tests.workers.runtime.jobs import Listener, drained, received

SAMPLES = ROOT / "models"


@pytest.fixture
def counter() -> Iterator[Runtime]:
    runtime = opened(SAMPLES / "counter" / "1")
    yield runtime
    runtime.close()


def test_counter_streams_chunks_progress_and_its_result(counter: Runtime):
    """Its yields are chunks, its reports are progress, and its return value is the result."""
    listener = Listener()
    chunks, outputs = drained(counter.stream(received({"count": np.array([4])}), listener))
    assert [chunk["value"].tolist() for chunk in chunks] == [[1], [2], [3], [4]]
    assert listener.fractions == [0.25, 0.5, 0.75, 1.0]
    assert outputs["total"].tolist() == [4]


def test_counter_stops_when_cancelled(counter: Runtime):
    """An entry point sees the cancellation between chunks."""
    listener = Listener()
    stream = counter.stream({"count": np.array([1000])}, listener)
    next(stream)
    listener.is_cancelled = True
    chunks, outputs = drained(stream)
    assert chunks == []
    assert outputs["total"].tolist() == [1]


def test_streaming_entry_point_also_runs_without_a_listener(counter: Runtime):
    """The result alone can be had like that of any model."""
    assert counter.run(counter.prepare([{"count": np.array([3])}]))["total"].tolist() == [3]


def write_streaming(root: Path, source: str) -> Path:
    folder = write_package(root, "stream", source)
    document = yaml.safe_load((folder / "model.yaml").read_text())
    document |= {"streams": True, "batching": {}}
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    return folder


def test_abandoned_stream_runs_the_entry_points_cleanup(models_root: Path):
    """Closing a stream half-way closes the entry point's generator, even if something else still refers to it."""
    source = """
    cleaned = []
    def build():
        def forever(inputs, ctx):
            try:
                while True:
                    yield {"y": 1}
            finally:
                cleaned.append(ctx.job_id)
        forever.cleaned = cleaned
        return forever
    """
    runtime = opened(write_streaming(models_root, source))
    assert isinstance(runtime, PythonRuntime)
    assert runtime.model is not None
    forever, kept = runtime.model, []

    def keeping(inputs, ctx):
        kept.append(forever(inputs, ctx))
        return kept[-1]

    runtime.model = keeping
    stream = runtime.stream({"x": np.zeros((1, 4), np.float32)}, Listener())
    next(stream)
    stream.close()
    assert forever.cleaned == ["", "counter.0"], "the warm-up comes first"  # type: ignore[attr-defined]


def test_streaming_entry_point_may_write_to_its_inputs(models_root: Path):
    """It changes a copy, not the received bytes."""
    source = """
    def build():
        def one(inputs, ctx):
            inputs["x"] += 1
            yield {}
            return {"y": inputs["x"]}
        return one
    """
    runtime = opened(write_streaming(models_root, source))
    job = received({"x": np.zeros((1, 4), np.float32)})
    assert drained(runtime.stream(job, Listener()))[1]["y"].tolist() == [[1.0] * 4]
    assert not job["x"].any()


def test_stream_that_returns_other_outputs_than_declared_fails_its_job(models_root: Path):
    """A result is checked against the signature before anyone sees it."""
    source = """
    def build():
        def one(inputs, ctx):
            yield {"part": "text"}
            return {"y": inputs["x"][:1]}
        return one
    """
    runtime = opened(write_streaming(models_root, source))
    stream = runtime.stream({"x": np.zeros((2, 4), np.float32)}, Listener())
    assert next(stream)["part"].item() == "text"
    with pytest.raises(ModelError, match=r"^Output y is float32 \(1, 4\)\. Declared is float32 \(batch, 4\)"):
        drained(stream)


def test_exceptions_of_a_model_pass_through(models_root: Path):
    """The drain decides what an exception means: the runtime neither hides nor renames it."""
    source = """
    def build():
        def forward(inputs):
            if inputs["x"].any():
                raise ZeroDivisionError("no")
            return {"y": inputs["x"]}
        return forward
    """
    runtime = opened(write_package(models_root, "raiser", source))
    with pytest.raises(ZeroDivisionError):
        runtime.run(runtime.prepare([{"x": np.ones((1, 4), np.float32)}]))


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("build = 3", "entrypoint model:build: found no function build, expected build() -> model"),
        ("def build(): raise OSError('x')", "entrypoint model:build: raised OSError: x (model.py, line 1, in build)"),
        (
            "import no_such_module",
            "entrypoint model:build: raised ModuleNotFoundError: No module named 'no_such_module' "
            "(model.py, line 1, in <module>)",
        ),
        (
            "def build():\n    return (",
            "entrypoint model:build: raised SyntaxError: '(' was never closed (model.py, line 2)",
        ),
        (
            "def build(): return 3",
            "entrypoint model:build: build() returned int, expected a function (inputs) -> outputs as streams says",
        ),
        (
            "def build():\n    def f(inputs):\n        yield inputs\n    return f",
            "entrypoint model:build: build() returned a generator function, expected a function (inputs) -> outputs "
            "as streams says",
        ),
        (
            "def build(): return lambda inputs: {'z': inputs['x']}",
            "The model returned the outputs: z. Declared outputs: y",
        ),
        (
            "def build(): return lambda inputs: {'y': inputs['x'].astype('f8')}",
            "Output y is float64 (2, 4). Declared is float32 (batch, 4) with batch = 2",
        ),
        (
            "def build(): return lambda inputs: 1 / 0",
            "the first forward failed (ZeroDivisionError: division by zero) (model.py, line 1, in <lambda>)",
        ),
    ],
)
def test_package_that_cannot_work_is_refused_when_loaded(models_root: Path, source: str, text: str):
    """A worker learns at its start, in one line, that a package builds nothing or answers something else."""
    folder = write_package(models_root, "broken", source)
    with pytest.raises(ConfigurationError) as refused:
        opened(folder)
    assert str(refused.value) == f"broken/1: {text}"


def test_model_in_training_mode_is_set_to_evaluation(models_root: Path):
    """Whatever has `training` and `eval()` answers as in evaluation, however it was built (IN-028)."""
    source = """
    class Model:
        training = True
        def eval(self):
            self.training = False
        def __call__(self, inputs):
            return {"y": inputs["x"] + self.training}
    def build():
        return Model()
    """
    runtime = opened(write_package(models_root, "trained", source))
    assert answers(runtime, x=np.zeros((1, 4), np.float32))["y"].tolist() == [[0.0] * 4]


def test_rows_that_are_missing_fail_the_batch_instead_of_shifting_answers(models_root: Path):
    """A model that drops a row never gives a job its neighbour's answer."""
    source = "def build(): return lambda inputs: {'y': inputs['x'][inputs['x'][:, 0] >= 0]}"
    runtime = opened(write_package(models_root, "filter", source))
    bad = {"x": np.full((1, 4), -1, np.float32)}
    with pytest.raises(ModelError, match="with batch = 2"):
        runtime.run(runtime.prepare([bad, {"x": np.ones((1, 4), np.float32)}]))


def test_memory_is_what_the_package_says(models_root: Path):
    """The memory of an entry point cannot be counted, so its package may declare it."""
    folder = write_package(models_root, "large", "def build(): return lambda inputs: {'y': inputs['x']}")
    document = yaml.safe_load((folder / "model.yaml").read_text()) | {"memory_mb": 3}
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    assert opened(folder).memory_bytes == 3 << 20


def test_precision_is_the_entry_points_own_affair(models_root: Path):
    """Numbers inside Python code cannot be cast, so a precision is refused instead of ignored."""
    folder = write_package(models_root, "half", "def build(): return lambda inputs: {'y': inputs['x']}")
    document = yaml.safe_load((folder / "model.yaml").read_text()) | {"precision": "bf16"}
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(
        ConfigurationError, match=r"precision: found bf16, expected auto for format python: its own code"
    ):
        opened(folder)


def test_answers_stay_what_they_were_when_the_next_batch_runs(models_root: Path):
    """An entry point may write all outputs into one array: the outputs of earlier jobs stay unchanged."""
    source = """
import numpy as np
LAST = np.zeros((64, 4), np.float32)
def fill(inputs):
    LAST[: len(inputs["x"])] = inputs["x"]
    return {"y": LAST[: len(inputs["x"])]}
def build():
    return fill
"""
    runtime = opened(write_package(models_root, "echo", source))
    first = answers(runtime, x=np.full((2, 4), 1, np.float32))["y"]
    answers(runtime, x=np.full((2, 4), 2, np.float32))
    assert first.tolist() == [[1.0] * 4] * 2


_MODULE = """
import torch
class Sum(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.dropout = torch.nn.Dropout(0.5)
    def forward(self, x):
        assert torch.is_inference_mode_enabled()
        return {"y": self.dropout(self.linear(x))}
def build():
    return Sum()
"""


def test_module_that_build_returns_is_called_with_tensors_by_name(models_root: Path, caplog: pytest.LogCaptureFixture):
    """It runs in inference mode and in evaluation mode, and the log says that the mode was changed (IN-028)."""
    with caplog.at_level("INFO", "penstock.runtime"):
        runtime = opened(write_package(models_root, "module", _MODULE))
    assert "the model was built in training mode and is set to evaluation mode" in caplog.messages
    assert isinstance(runtime, PythonRuntime)
    x = np.ones((3, 4), np.float32)
    module: Any = runtime.model
    expected = module.linear.weight.detach().numpy().sum(1) + module.linear.bias.detach().numpy()
    np.testing.assert_allclose(answers(runtime, x=x)["y"], np.tile(expected, (3, 1)), rtol=1e-5, atol=1e-6)
    assert runtime.memory_bytes == (4 * 4 + 4) * 4


def test_only_output_needs_no_name(models_root: Path):
    """One tensor or array is the one declared output; any other number of outputs needs names."""
    tensor = "import torch\ndef build():\n    return torch.nn.ReLU()"
    with pytest.raises(
        ConfigurationError, match=r"forward\(\) of ReLU: .*expected the declared inputs as arguments: x$"
    ):
        opened(write_package(models_root, "relu", tensor))
    for name, source in (
        ("array", "def build(): return lambda inputs: inputs['x']"),
        ("tensor", "import torch\ndef build(): return lambda inputs: torch.from_numpy(inputs['x']).requires_grad_()"),
    ):
        x = np.full((2, 4), 3, np.float32)
        assert answers(opened(write_package(models_root, name, source)), x=x)["y"].tolist() == x.tolist()
    folder = write_package(models_root, "two", "def build(): return lambda inputs: inputs['x']")
    document = yaml.safe_load((folder / "model.yaml").read_text())
    document["outputs"] = [{"name": name, "dtype": "float32", "shape": ["batch", 4]} for name in "yz"]
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigurationError, match=r"returned ndarray\. Expected a mapping of names to arrays$"):
        opened(folder)


def test_module_with_optional_inputs_gets_those_that_are_there(models_root: Path):
    """An absent optional input is not passed: the module's own default counts."""
    source = """
    import torch
    class Plus(torch.nn.Module):
        def forward(self, x, more=None):
            return x if more is None else x + more
    def build():
        return Plus()
    """
    folder = write_package(models_root, "plus", source)
    document = yaml.safe_load((folder / "model.yaml").read_text())
    document["inputs"].append({"name": "more", "dtype": "float32", "shape": ["batch", 4], "optional": True})
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    runtime, x = opened(folder), np.ones((1, 4), np.float32)
    assert answers(runtime, x=x)["y"].tolist() == [[1.0] * 4]
    assert answers(runtime, x=x, more=x)["y"].tolist() == [[2.0] * 4]


def test_module_takes_no_text(models_root: Path):
    """A tensor holds numbers; text needs a function."""
    folder = write_package(models_root, "text", _MODULE)
    document = yaml.safe_load((folder / "model.yaml").read_text())
    document["inputs"] = [{"name": "x", "dtype": "string", "shape": ["batch"]}]
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(ConfigurationError, match=r"^text/1: found a string tensor, expected numbers for a torch.nn.M"):
        opened(folder)
