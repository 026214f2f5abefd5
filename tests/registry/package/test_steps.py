"""The names in the steps of a pipeline: each is made once, before it is used, and is used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import ModelSpec, load_package
from tests.pipelines import CHAIN, X, write_chain, write_pipeline, write_step
from tests.registry.package.documents import PLAIN, changed, write

FIRST, SECOND = CHAIN


def step(package: str, inputs: dict[str, str], outputs: dict[str, str]) -> dict[str, Any]:
    return {"package": package, "inputs": inputs, "outputs": outputs}


REFUSED: list[tuple[str, list[dict[str, Any]], str]] = [
    (
        "unknown name",
        [FIRST, step("second", {"x": "midle"}, {"y": "y"})],
        "steps[1].inputs.x: found 'midle', expected an input of the pipeline or an output of an earlier step: x, "
        "middle",
    ),
    (
        "name of a later step",
        [SECOND, FIRST],
        "steps[0].inputs.x: found 'middle', which steps[1] makes, expected an input of the pipeline or an output of an "
        "earlier step: x",
    ),
    (
        "cycle of two steps",
        [step("first", {"x": "b", "z": "x"}, {"y": "a"}), step("second", {"x": "a"}, {"y": "b", "w": "y"})],
        "steps[0].inputs.x: found 'b', which steps[1] makes, expected an input of the pipeline or an output of an "
        "earlier step: x",
    ),
    (
        "step that takes its own output",
        [step("first", {"x": "y", "z": "x"}, {"y": "y"})],
        "steps[0].inputs.x: found 'y', which the same step makes, expected an input of the pipeline or an output of an "
        "earlier step: x",
    ),
    (
        "name made twice",
        [FIRST, step("second", {"x": "middle"}, {"y": "middle"})],
        "steps[1].outputs.y: found 'middle', which is made by steps[0] already, expected a new name",
    ),
    (
        "name made twice by one step",
        [step("first", {"x": "x"}, {"y": "y", "z": "y"})],
        "steps[0].outputs.z: found 'y', which is made by the same step already, expected a new name",
    ),
    (
        "name of an input",
        [step("first", {"x": "x"}, {"y": "x"})],
        "steps[0].outputs.y: found 'x', which is an input of the pipeline already, expected a new name",
    ),
    (
        "output that no step makes",
        [step("first", {"x": "x"}, {"y": "middle"})],
        "outputs: y: found no step that makes it, expected one of: middle",
    ),
    (
        "step without a use",
        [step("first", {"x": "x"}, {"y": "y"}), step("second", {"x": "x"}, {"y": "middle"})],
        "steps[1]: found no use of middle, expected a later step or an output of the pipeline that takes it",
    ),
    ("no step", [], "steps: found [], expected at least 1 entry"),
    ("no input", [step("first", {}, {"y": "y"})], "steps[0].inputs: found {}, expected at least 1 entry"),
    (
        "misspelt field",
        [{**FIRST, "packages": "first"}],
        "steps[0].packages: unknown field, expected package",
    ),
    (
        "name that is no name",
        [step("first", {"x": "a b"}, {"y": "y"})],
        "steps[0].inputs.x: found 'a b', expected 1 to 64 letters, digits, '.', '_' or '-', not a digit first",
    ),
    *(
        (
            f"path {path}",
            [step(path, {"x": "x"}, {"y": "y"})],
            f"steps[0].package: found '{path}', expected a relative path inside the package",
        )
        for path in ("../other/1", "/etc", "first/../../other")
    ),
]


@pytest.mark.parametrize(("steps", "problem"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_steps_that_do_not_connect_are_one_line(models_root: Path, steps: list[dict[str, Any]], problem: str):
    """The line names the package, the field, the value found and the values expected; no step was read for it."""
    with pytest.raises(ConfigurationError) as refused:
        load_package(write_pipeline(models_root, steps=steps))
    assert str(refused.value) == f"chain/1/model.yaml: {problem}"


def test_input_that_no_step_takes_is_refused(models_root: Path):
    """Jobs would carry it for nothing."""
    folder = write_pipeline(models_root, inputs={**X, "mask": ("bool", ["batch"])})
    with pytest.raises(ConfigurationError) as refused:
        load_package(folder)
    assert str(refused.value) == (
        "chain/1/model.yaml: inputs: mask: found no step that takes it, expected one, or no such input"
    )


def test_steps_belong_to_a_pipeline_and_to_no_other_format(models_root: Path):
    """Each of the two is refused without the other."""
    with pytest.raises(
        ConfigurationError, match=r"^plain/1/model.yaml: steps: found some, expected none for format py"
    ):
        load_package(write(models_root, changed(PLAIN, steps=CHAIN)))
    bare = changed(PLAIN, format="pipeline", entrypoint=None)
    with pytest.raises(
        ConfigurationError, match=r"^plain/1/model.yaml: steps: missing, expected a list of steps for f"
    ):
        load_package(write(models_root, bare))
    with pytest.raises(ConfigurationError, match=r"entrypoint: found one, expected none for format pipeline$"):
        load_package(write(models_root, changed(bare, steps=CHAIN, entrypoint="model:build")))


def test_one_name_may_feed_several_steps_and_one_package_may_be_several_steps(models_root: Path):
    """Two uses of one package are two steps over one package, and what clients read from the broker is the same."""
    steps = [
        step("first", {"x": "x"}, {"y": "a"}),
        step("first", {"x": "a"}, {"y": "b"}),
        step("join", {"x": "x", "z": "b"}, {"y": "y"}),
    ]
    folder = write_pipeline(models_root, steps=steps)
    write_step(folder, "first")
    write_step(folder, "join", inputs={**X, "z": ("float32", ["batch", 4])})
    package = load_package(folder)
    assert [each.folder.name for each in package.steps] == ["first", "first", "join"]
    assert package.steps[0] is package.steps[1]
    assert ModelSpec.from_json(package.spec.to_json()) == package.spec


def test_names_are_checked_before_the_folders_are_read(models_root: Path):
    """A client checks the spec from the broker in the same way; it has no folders."""
    folder = write_chain(models_root)
    spec = load_package(folder).spec
    assert spec.steps is not None
    broken = spec.to_json().replace(b'"middle"', b'"centre"', 1)
    with pytest.raises(
        ConfigurationError, match=r"^Stored model spec: steps\[1\]\.inputs\.x: found 'middle', expected"
    ):
        ModelSpec.from_json(broken)
