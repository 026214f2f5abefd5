"""Pipelines: several packages of any format in one process, one forward of each for a whole batch."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from penstock.registry.errors import (
    ConfigurationError,
    InvalidInput,
    MissingRequirement,
    ModelError,
    ModelNotReady,
    NonFiniteOutput,
    OutOfMemory,
)
from penstock.registry.package import load_package
from penstock.registry.tensors import Array
from penstock.workers.runtime import Runtime, open_runtime
from penstock.workers.runtime.base import Counted, DeviceLost
from penstock.workers.runtime.forms import Tunable
from penstock.workers.runtime.instances import ProcessInstances, ThreadInstances
from penstock.workers.runtime.step_graph import StepGraphRuntime
from penstock.workers.runtime.tracebacks import trace_of
from tests.pipelines import CHAIN, DOUBLE, Tensors, X, Y, write_chain, write_pipeline, write_step
from tests.workers.runtime import formats
from tests.workers.runtime.formats import answers, opened
from tests.workers.runtime.jobs import received

FIRST, SECOND = CHAIN
NAME_LARGEST = """
import numpy as np

def build():
    names = np.array(["north", "east", "south", "west"], object)
    return lambda inputs: {"label": names[inputs["y"].argmax(axis=1)], "score": inputs["y"].max(axis=1)}
"""
RECORDED = """
import json, os

def build():
    log = os.open({log!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def forward(inputs):
        os.write(log, (json.dumps([{step!r}, len(inputs["x"])]) + "\\n").encode())
        return {{"y": inputs["x"] + {added}}}

    return forward
"""
FAILING = """
import os

def build():
    def forward(inputs):
        if (inputs["x"] < 0).any():
            raise {raised}
        return {{"y": inputs["x"]}}

    return forward
"""


def numbers(rows: int, seed: int = 3) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, 4), np.float32)


def steps_of(runtime: Runtime) -> Mapping[str, Runtime]:
    """The runtimes of the steps, by their folders."""
    assert isinstance(runtime, StepGraphRuntime)
    return runtime._runtimes


def failing(root: Path, raised: str, **pipeline: Any) -> Runtime:
    """A chain whose second step raises for negative numbers, loaded."""
    folder = write_pipeline(root, **pipeline)
    write_step(folder, "first")
    write_step(folder, "second", FAILING.format(raised=raised))
    return opened(folder)


def test_steps_of_three_formats_give_what_they_give_by_hand(models_root: Path):
    """ONNX, torch and Python: the outputs are those of the three packages called one after another."""
    steps = [
        {"package": "graph", "inputs": {"x": "x"}, "outputs": {"y": "hidden"}},
        {"package": "module", "inputs": {"x": "hidden"}, "outputs": {"y": "votes"}},
        {"package": "name", "inputs": {"y": "votes"}, "outputs": {"label": "label", "score": "score"}},
    ]
    outputs = {"label": ("string", ["batch"]), "score": ("float32", ["batch"])}
    folder = write_pipeline(models_root, steps=steps, outputs={**outputs, "votes": ("float32", ["batch", 4])})
    alone = [formats.write_onnx(models_root, name="graph"), formats.write_pytorch(models_root, name="module")]
    for package in alone:
        package.rename(folder / package.parent.name)
    write_step(folder, "name", NAME_LARGEST, inputs=Y, outputs=outputs)
    runtime = opened(folder)
    x = numbers(5)
    found = answers(runtime, x=x)

    graph, module, name = steps_of(runtime).values()
    votes = answers(module, x=answers(graph, x=x)["y"])["y"]
    expected = answers(name, y=votes)
    np.testing.assert_array_equal(found["votes"], votes)
    np.testing.assert_allclose(votes, formats.affine(formats.affine(x)), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(found["score"], expected["score"])
    assert found["label"].tolist() == expected["label"].tolist()
    assert len(set(found["label"].tolist())) > 1
    runtime.close()


def test_text_goes_through_an_encoder_to_a_classifier(models_root: Path):
    """The embedding stays in the worker: the job has text in and a number out."""
    text = {"text": ("string", ["batch"])}
    steps = [
        {"package": "embed", "inputs": {"text": "text"}, "outputs": {"embedding": "vector"}},
        {"package": "head", "inputs": {"x": "vector"}, "outputs": {"y": "y"}},
    ]
    folder = write_pipeline(models_root, "search", steps=steps, inputs=text, outputs={"y": ("float32", ["batch"])})
    formats.write_encoder(models_root, name="alone").rename(folder / "embed")
    source = 'def build():\n    return lambda inputs: {"y": inputs["x"].sum(axis=1)}\n'
    vector: Tensors = {"x": ("float32", ["batch", 16])}
    write_step(folder, "head", source, inputs=vector, outputs={"y": ("float32", ["batch"])})
    runtime = opened(folder)
    texts = np.array(["abc", "", "hello there"], object)
    embedding = answers(steps_of(runtime)["embed"], text=texts)["embedding"]
    np.testing.assert_allclose(answers(runtime, text=texts)["y"], embedding.sum(axis=1), rtol=1e-5)
    runtime.check({"text": texts})
    with pytest.raises(InvalidInput, match=r"^step embed: text: \d+ tokens\. Expected at most 32$"):
        runtime.check({"text": np.array(["ab " * 40], object)})
    runtime.close()


def test_ensemble_averages_two_models(models_root: Path):
    """Two steps take the same input, and a third one their outputs."""
    steps = [
        {"package": "affine", "inputs": {"x": "x"}, "outputs": {"y": "a"}},
        {"package": "double", "inputs": {"x": "x"}, "outputs": {"y": "b"}},
        {"package": "mean", "inputs": {"a": "a", "b": "b"}, "outputs": {"y": "y"}},
    ]
    folder = write_pipeline(models_root, steps=steps)
    formats.write_torchscript(models_root, name="alone").rename(folder / "affine")
    write_step(folder, "double")
    mean = 'def build():\n    return lambda inputs: {"y": (inputs["a"] + inputs["b"]) / 2}\n'
    write_step(folder, "mean", mean, inputs={"a": Y["y"], "b": Y["y"]})
    runtime = opened(folder)
    x = numbers(3)
    np.testing.assert_allclose(answers(runtime, x=x)["y"], (formats.affine(x) + 2 * x) / 2, rtol=1e-5, atol=1e-6)
    runtime.close()


def test_batch_of_jobs_is_one_forward_of_each_step(models_root: Path, tmp_path: Path):
    """Jobs of one, two and three rows: each step is called once, with six rows, in the order of the steps."""
    log = tmp_path / "forwards"
    folder = write_pipeline(models_root)
    for step, added in (("first", 1), ("second", 10)):
        write_step(folder, step, RECORDED.format(log=str(log), step=step, added=added))
    runtime = opened(folder)
    assert isinstance(runtime, Counted)
    log.write_text("")
    before = runtime.counts()["model_calls"]
    jobs = [received({"x": numbers(rows, seed=rows)}) for rows in (1, 2, 3)]
    outputs = runtime.run(runtime.prepare(jobs))["y"]
    assert [json.loads(line) for line in log.read_text().splitlines()] == [["first", 6], ["second", 6]]
    assert runtime.counts()["model_calls"] - before == 2
    np.testing.assert_array_equal(outputs, np.concatenate([job["x"] for job in jobs]) + 1 + 10)
    runtime.close()


def test_package_of_two_steps_is_loaded_once(models_root: Path):
    """Two uses share one model and its memory."""
    folder = write_pipeline(models_root, steps=[FIRST, SECOND | {"package": "first"}])
    write_step(folder, "first", memory_mb=3)
    runtime = opened(folder)
    assert len(steps_of(runtime)) == 1
    assert runtime.memory_bytes == load_package(folder).spec.memory_mb * (1 << 20)  # type: ignore[operator]
    assert answers(runtime, x=np.ones((1, 4), np.float32))["y"].tolist() == [[4.0] * 4]
    runtime.close()


def test_memory_is_that_of_all_steps(models_root: Path):
    """Measured where a runtime measures, declared elsewhere; the limit of a worker counts the whole."""
    folder = formats.write_steps(models_root)
    runtime = opened(folder)
    measured = [step.memory_bytes for step in steps_of(runtime).values()]
    assert all(measured)
    assert runtime.memory_bytes == sum(measured)
    runtime.close()
    assert runtime.memory_bytes == 0
    declared = opened(formats.write_steps(models_root, memory_mb=64))
    assert declared.memory_bytes == 64 << 20
    declared.close()


@pytest.mark.parametrize(
    ("raised", "kind", "text"),
    [
        ('KeyError("k")', ModelError, "step second: KeyError: 'k'"),
        ("SystemExit(3)", ModelError, "step second: SystemExit: 3"),
        ('MemoryError("full")', OutOfMemory, "step second: full"),
    ],
)
def test_error_of_a_step_names_it_and_the_line(models_root: Path, raised: str, kind: type[Exception], text: str):
    """The message has the step, the class and the text; the trace has file and line of the step's own code."""
    runtime = failing(models_root, raised)
    with pytest.raises(kind) as error:
        answers(runtime, x=-np.ones((1, 4), np.float32))
    assert type(error.value) is kind
    assert str(error.value) == text
    assert trace_of(error.value).where == "model.py, line 7, in forward"
    assert f"raise {raised}" in trace_of(error.value).text
    runtime.close()


def test_lost_device_is_no_fault_of_a_step(models_root: Path):
    """The worker must see it: another process takes the place of this one."""
    raised = '__import__("penstock.workers.runtime.base", fromlist=["DeviceLost"]).DeviceLost("cuda:0")'
    runtime = failing(models_root, raised)
    with pytest.raises(DeviceLost, match=r"^cuda:0$"):
        answers(runtime, x=-np.ones((1, 4), np.float32))
    runtime.close()


def test_tensor_between_steps_is_compared_with_the_declarations(models_root: Path):
    """An extent that only the forward knows, NaN, a number that does not fit, a range: each names step and input."""
    folder = write_pipeline(models_root)
    source = """
    import numpy as np

    def build():
        def forward(inputs):
            asked, rows = inputs["x"][0, 0], len(inputs["x"])
            if asked == 1:
                return {"y": np.zeros((rows, 5))}
            if asked == 2:
                return {"y": np.full((rows, 4), np.nan)}
            return {"y": np.full((rows, 4), {3: 1e300, 4: -7.0}.get(int(asked), 0.0))}
        return forward
    """
    write_step(folder, "first", source, outputs={"y": ("float64", ["batch", "width"])})
    write_step(folder, "second", DOUBLE)
    file = folder / "second" / "model.yaml"
    document = yaml.safe_load(file.read_text())
    document["inputs"][0]["min"] = -1
    file.write_text(yaml.safe_dump(document))
    runtime = opened(folder)
    for asked, kind, text in (
        (1, ModelError, "step second: x: shape (1, 5). Expected (batch, 4), every extent at least 1"),
        (2, NonFiniteOutput, "step first: Output y contains NaN or infinity. Expected finite numbers"),
        (3, ModelError, "step second: Input x: dtype float64, and a value does not fit. Expected numbers that float32 "
                        "can hold"),
        (4, ModelError, "step second: x: a value is below the range. Expected values of at least -1"),
    ):  # fmt: skip
        with pytest.raises(ModelError if kind is ModelError else NonFiniteOutput) as error:
            answers(runtime, x=np.full((1, 4), asked, np.float32))
        assert str(error.value) == text
    assert answers(runtime, x=np.zeros((2, 4), np.float32))["y"].dtype == np.float32
    runtime.close()


def test_step_that_answers_other_outputs_than_declared_is_refused_at_load(models_root: Path):
    """The pipeline, the step and the output, in one line."""
    folder = write_chain(models_root)
    (folder / "second" / "model.py").write_text('def build():\n    return lambda inputs: {"z": inputs["x"]}\n')
    with pytest.raises(ConfigurationError) as refused:
        opened(folder)
    assert str(refused.value) == (
        "chain/1: step second: second/7: The model returned the outputs: z. Declared outputs: y"
    )


def test_step_that_cannot_be_built_names_the_line(models_root: Path):
    """The steps that were loaded before it are released."""
    folder = write_chain(models_root)
    (folder / "second" / "model.py").write_text("def build():\n    return {}['weights']\n")
    runtime = open_runtime(load_package(folder))
    with pytest.raises(ConfigurationError) as refused:
        runtime.load("cpu", 1)
    assert str(refused.value) == (
        "chain/1: step second: second/7: entrypoint model:build: raised KeyError: 'weights' "
        "(model.py, line 2, in build)"
    )
    first = steps_of(runtime)["first"]
    with pytest.raises(ModelNotReady):
        answers(first, x=numbers(1))


def test_missing_package_of_a_step_is_a_lack_of_this_machine(models_root: Path):
    """`penstock models check` tells a wrong package from a machine that lacks something."""
    folder = write_chain(models_root)
    (folder / "second" / "requirements.txt").write_text("no-such-distribution>=1\n")
    with pytest.raises(MissingRequirement, match=r"^chain/1: step second: second/7: requirements.txt: no-such-distrib"):
        opened(folder)


def test_framework_that_the_setting_forbids_is_forbidden_in_a_step(models_root: Path):
    """The label is the path of the step."""
    package = load_package(formats.write_steps(models_root))
    with pytest.raises(ConfigurationError, match=r"^steps/1/sum: format torchscript needs the framework pytorch, "):
        open_runtime(package, frameworks=["onnxruntime"])


def test_other_content_of_a_step_than_promoted_is_refused(models_root: Path):
    """A version that was promoted is every byte of every step."""
    folder = write_chain(models_root)
    promoted = load_package(folder).manifest().content_hash
    opened(folder, content_hash=promoted).close()
    (folder / "second" / "model.py").write_text("raise SystemExit('executed')\n")
    with pytest.raises(ConfigurationError, match=r"^chain/1: its files differ from those that were promoted"):
        opened(folder, content_hash=promoted)


def test_optional_input_that_a_job_omits_does_not_reach_the_step(models_root: Path):
    """The step sees it where the job has it."""
    folder = write_pipeline(models_root, steps=[FIRST | {"inputs": {"x": "x", "more": "more"}}, SECOND])
    write_step(folder, "second")
    source = 'def build():\n    return lambda inputs: {"y": inputs["x"] + inputs.get("more", 100)}\n'
    write_step(folder, "first", source)
    for file in (folder / "model.yaml", folder / "first" / "model.yaml"):
        document = yaml.safe_load(file.read_text())
        document["inputs"].append({"name": "more", "dtype": "float32", "shape": ["batch", 4], "optional": True})
        file.write_text(yaml.safe_dump(document))
    runtime = opened(folder)
    x = np.ones((1, 4), np.float32)
    assert answers(runtime, x=x)["y"].tolist() == [[202.0] * 4]
    assert answers(runtime, x=x, more=x)["y"].tolist() == [[4.0] * 4]
    runtime.close()


def test_step_cannot_change_what_another_one_made(models_root: Path):
    """An output of the pipeline is what its step made, whatever a later step does with its input."""
    folder = write_pipeline(models_root, outputs={**Y, "middle": ("float32", ["batch", 4])})
    write_step(folder, "first")
    vandal = """
    def build():
        def forward(inputs):
            inputs["x"] += 1000
            return {"y": inputs["x"]}
        return forward
    """
    write_step(folder, "second", vandal)
    runtime = opened(folder)
    found = answers(runtime, x=np.ones((1, 4), np.float32))
    assert found["middle"].tolist() == [[2.0] * 4]
    assert found["y"].tolist() == [[1002.0] * 4]
    runtime.close()


def test_pipeline_has_no_other_form(models_root: Path):
    """The optimization levels leave it as its authors built it, but for batching."""
    runtime = opened(formats.write_steps(models_root))
    assert not isinstance(runtime, Tunable)
    runtime.close()


@pytest.mark.parametrize(("kind", "instances"), [("process", ProcessInstances), ("thread", ThreadInstances)])
def test_pipeline_has_instances(models_root: Path, kind: str, instances: type):
    """Each instance has all steps; with the limits that were checked in the worker."""
    folder = write_chain(models_root, instances=2, instance_kind=kind)
    runtime = opened(folder)
    assert isinstance(runtime, instances)
    assert answers(runtime, x=np.ones((3, 4), np.float32))["y"].tolist() == [[4.0] * 4] * 3
    runtime.close()


def test_close_lets_go_of_every_step(models_root: Path):
    """Nothing of a version that was unloaded stays in memory."""
    runtime = opened(formats.write_steps(models_root))
    module: Any = steps_of(runtime)["sum"]
    model = weakref.ref(module.model)
    assert isinstance(model(), torch.nn.Module)
    runtime.close()
    gc.collect()
    assert model() is None
    with pytest.raises(ModelNotReady, match=r"^Model not loaded: steps/1$"):
        answers(runtime, **{name: np.zeros((1, 4), np.float32) for name in X})
