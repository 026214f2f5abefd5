"""A pipeline and the packages of its steps: found in its folder, fitting each other, covered by one hash."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import load_package
from tests.pipelines import CHAIN, Tensors, X, Y, write_chain, write_pipeline, write_step
from tests.registry.package.documents import PLAIN, write
from tests.servers import ROOT

FIRST, SECOND = CHAIN


def problem_of(folder: Path, *trusted: Path) -> str:
    """The refusal of a package."""
    with pytest.raises(ConfigurationError) as refused:
        load_package(folder, trusted or None)
    return str(refused.value)


def amend(folder: Path, **fields: Any) -> None:
    """Replaces fields of a model.yaml; None removes one."""
    file = folder / "model.yaml"
    document = yaml.safe_load(file.read_text()) | fields
    file.write_text(yaml.safe_dump({name: value for name, value in document.items() if value is not None}))


MISFITS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    (
        "unknown input of a step",
        {"steps": [FIRST, SECOND | {"inputs": {"x": "middle", "z": "x"}}]},
        {},
        "steps[1].inputs.z: unknown name, expected one of second: x",
    ),
    (
        "unknown output of a step",
        {"steps": [FIRST, SECOND | {"outputs": {"z": "y"}}]},
        {},
        "steps[1].outputs.z: unknown name, expected one of second: y",
    ),
    (
        "input of a step without a value",
        {},
        {"inputs": {**X, "mask": ("float32", ["batch"])}},
        "steps[1].inputs.mask: missing, expected a value for each input of second",
    ),
    (
        "text for numbers",
        {},
        {"inputs": {"x": ("string", ["batch", 4])}},
        "steps[1].inputs.x: found middle of dtype float32, expected string as second declares",
    ),
    (
        "truth values for numbers",
        {},
        {"inputs": {"x": ("bool", ["batch", 4])}},
        "steps[1].inputs.x: found middle of dtype float32, expected bool as second declares",
    ),
    (
        "another width",
        {},
        {"inputs": {"x": ("float32", ["batch", 8])}},
        "steps[1].inputs.x: found middle of shape (batch, 4), expected (batch, 8) as second declares",
    ),
    (
        "another rank",
        {},
        {"inputs": {"x": ("float32", ["batch"])}},
        "steps[1].inputs.x: found middle of shape (batch, 4), expected (batch,) as second declares",
    ),
    (
        "output of another dtype",
        {},
        {"outputs": {"y": ("string", ["batch", 4])}},
        "outputs: y: found y of dtype string, expected float32 as the pipeline declares",
    ),
    (
        "output of another shape",
        {},
        {"outputs": {"y": ("float32", ["batch", 3])}},
        "outputs: y: found y of shape (batch, 3), expected (batch, 4) as the pipeline declares",
    ),
    (
        "step that streams",
        {},
        {"streams": True, "batching": {"max_batch_size": 1}},
        "steps[1].package: found 'second', which streams, expected a package without streams",
    ),
    (
        "larger batches than a step runs",
        {"batching": {"max_batch_size": 64}},
        {"batching": {"max_batch_size": 8}},
        "batching.max_batch_size: found 64, expected at most 8 as second declares",
    ),
]


@pytest.mark.parametrize(
    ("pipeline", "second", "problem"), [case[1:] for case in MISFITS], ids=[case[0] for case in MISFITS]
)
def test_steps_that_do_not_fit_are_one_line(
    models_root: Path, pipeline: dict[str, Any], second: dict[str, Any], problem: str
):
    """The declarations are compared when the package is read, before anything is loaded."""
    folder = write_pipeline(models_root, **pipeline)
    write_step(folder, "first")
    write_step(folder, "second", **second)
    assert problem_of(folder) == f"chain/1/model.yaml: {problem}"


def test_symbolic_extents_and_other_numbers_fit(models_root: Path):
    """An extent that is known only at run time is compared then; numbers are converted as those of jobs are."""
    folder = write_pipeline(models_root)
    write_step(folder, "first", outputs={"y": ("float64", ["batch", "width"])})
    write_step(folder, "second", inputs={"x": ("float32", ["batch", 4])}, outputs={"y": ("float64", ["batch", 4])})
    assert len(load_package(folder).steps) == 2


def test_optional_input_reaches_only_steps_that_can_do_without(models_root: Path):
    """A job that omits it would have nothing for the step."""
    folder = write_pipeline(models_root, steps=[FIRST | {"inputs": {"x": "x", "mask": "mask"}}, SECOND])
    document = yaml.safe_load((folder / "model.yaml").read_text())
    mask = {"name": "mask", "dtype": "float32", "shape": ["batch"], "optional": True}
    amend(folder, inputs=[*document["inputs"], mask])
    write_step(folder, "second")
    write_step(folder, "first", inputs={**X, "mask": ("float32", ["batch"])})
    assert problem_of(folder) == (
        "chain/1/model.yaml: steps[0].inputs.mask: found 'mask', which jobs may omit, expected an input of every job "
        "as first declares"
    )
    amend(folder / "first", inputs=[*document["inputs"], mask])
    assert load_package(folder).spec.inputs[1].optional


def test_limits_of_steps_are_those_of_the_pipeline(models_root: Path):
    """The smallest batch, all memory together, and chance in one step is chance in the whole."""
    folder = write_pipeline(models_root)
    write_step(folder, "first", batching={"max_batch_size": 32}, memory_mb=100)
    write_step(folder, "second", batching={"max_batch_size": 8}, memory_mb=20, deterministic=False)
    spec = load_package(folder).spec
    assert (spec.batching.max_batch_size, spec.memory_mb, spec.deterministic) == (8, 120, False)
    amend(folder, batching={"max_batch_size": 4}, memory_mb=500)
    spec = load_package(folder).spec
    assert (spec.batching.max_batch_size, spec.memory_mb) == (4, 500)


def test_limit_of_lengths_reaches_the_steps(models_root: Path):
    """The longest input of any model is that of the steps, too."""
    folder = write_chain(models_root)
    sequence = {"name": "x", "dtype": "float32", "shape": ["batch", "length"]}
    amend(folder / "second", inputs=[sequence], batching={"length_input": "x"})
    steps = load_package(folder).limited_to(3).steps
    assert [step.spec.batching.max_length for step in steps] == [None, 3]


def test_folder_of_a_step_is_inside_the_pipeline(models_root: Path):
    """Each mistake is a line with the number of the step and its folder."""
    folder = write_pipeline(models_root)
    write_step(folder, "second")
    field = "chain/1/model.yaml: steps[0].package:"
    assert problem_of(folder) == f"{field} found 'first', expected a folder inside the package"
    (folder / "first").mkdir()
    assert problem_of(folder) == f"{field} found 'first' without model.yaml, expected the folder of a package"
    (folder / "first").rmdir()
    elsewhere = write(models_root, PLAIN)
    (folder / "first").symlink_to(elsewhere)
    assert problem_of(folder) == f"{field} found 'first', expected a folder inside the package"
    (folder / "first").unlink()
    (folder / "first").mkdir()
    (folder / "first" / "model.yaml").symlink_to(elsewhere / "model.yaml")
    assert problem_of(folder) == f"{field} found 'first' without model.yaml, expected the folder of a package"


def test_pipeline_in_a_pipeline_is_refused(models_root: Path):
    """Also when the step is the pipeline itself."""
    folder = write_pipeline(models_root, steps=[FIRST | {"package": "."}, SECOND])
    write_step(folder, "second")
    said = "a pipeline itself, expected another format"
    assert problem_of(folder) == f"chain/1/model.yaml: steps[0].package: found '.', {said}"
    folder = write_chain(models_root, "outer")
    (folder / "first" / "model.py").unlink()
    inner = yaml.safe_load((write_chain(models_root, "inner") / "model.yaml").read_text())
    (folder / "first" / "model.yaml").write_text(yaml.safe_dump(inner))
    assert problem_of(folder) == f"outer/1/model.yaml: steps[0].package: found 'first', {said}"


def test_mistake_in_a_step_names_its_file(models_root: Path):
    """The path is that below the models root."""
    folder = write_chain(models_root)
    amend(folder / "second", concurrency="2")
    assert problem_of(folder).startswith('chain/1/second/model.yaml: concurrency: found "2", expected a whole number')
    amend(folder / "second", concurrency=None, entrypoint="absent:build")
    assert problem_of(folder) == (
        "chain/1/second/model.yaml: entrypoint: found 'absent:build', expected a module inside the package"
    )


def test_code_of_a_step_needs_a_trusted_root(models_root: Path, tmp_path: Path):
    """A pipeline is not a way around it."""
    folder = write_chain(models_root)
    assert load_package(folder, [models_root]).steps
    assert problem_of(folder, tmp_path / "other").startswith(
        "chain/1/first/model.yaml: entrypoint: the package runs code and lies outside the trusted roots"
    )


def test_content_hash_covers_every_step(models_root: Path):
    """A change of one byte in any step is another version of the whole."""
    folder = write_chain(models_root)
    package = load_package(folder)
    before = package.manifest()
    assert sorted(before.files) == [
        *("first/model.py", "first/model.yaml", "model.yaml"),
        *("second/model.py", "second/model.yaml"),
    ]
    (folder / "second" / "model.py").write_text("def build(): return None\n")
    after = package.manifest()
    assert after.content_hash != before.content_hash
    with pytest.raises(ConfigurationError, match=r"^chain/1: file second/model.py: changed since it was hashed"):
        before.check_unchanged()


def test_declaration_of_a_step_that_changes_after_it_was_read_is_refused(models_root: Path):
    """The worker would serve another declaration than the one that it hashed."""
    folder = write_chain(models_root)
    package = load_package(folder)
    amend(folder / "second", device="cpu")
    with pytest.raises(ConfigurationError, match=r"^chain/1/second: file model.yaml: changed since it was read"):
        package.manifest()


def test_checksums_of_a_step_are_compared(models_root: Path):
    """`files` in the model.yaml of a step names the files of its folder."""
    folder = write_chain(models_root)
    amend(folder / "second", files={"model.py": "0" * 64})
    with pytest.raises(ConfigurationError, match=r"^chain/1/second/model.yaml: files: model.py: found SHA-256 "):
        load_package(folder).manifest()


def test_weights_of_a_step_are_inspected(models_root: Path):
    """A pickle is refused in a step as in any package."""
    folder = write_pipeline(models_root, steps=[FIRST, SECOND])
    write_step(folder, "first")
    write_step(folder, "second", format="torchscript", entrypoint=None, weights="model.pt")
    amend(folder / "second", entrypoint=None)
    (folder / "second" / "model.pt").write_bytes(b"a pickle")
    with pytest.raises(ConfigurationError, match=r"^chain/1/second: file model.pt: found no archive"):
        load_package(folder).manifest()


def test_weights_outside_the_folder_are_hashed_too(models_root: Path):
    """A step may have its weights in an installed package, as any encoder; their paths begin with the step's folder."""
    text: Tensors = {"text": ("string", ["batch"])}
    vector: Tensors = {"embedding": ("float32", ["batch", 384])}
    embed = {"package": "embed", "inputs": {"text": "text"}, "outputs": {"embedding": "embedding"}}
    folder = write_pipeline(models_root, "search", steps=[embed], inputs=text, outputs=vector)
    (folder / "embed").mkdir()
    (folder / "embed" / "model.yaml").write_bytes((ROOT / "models" / "minilm" / "1" / "model.yaml").read_bytes())
    package = load_package(folder)
    manifest = package.manifest()
    alone = load_package(ROOT / "models" / "minilm" / "1").manifest()
    assert manifest.source_files == {f"embed/{path}": digest for path, digest in alone.source_files.items()}
    assert package.spec.batching.max_batch_size == 64
    assert manifest.nbytes > sum(len(digest) for digest in alone.source_files.values())


def test_spec_in_the_broker_is_plain_data(models_root: Path):
    """Clients of other languages read the steps, too."""
    stored = json.loads(load_package(write_chain(models_root)).spec.to_json())
    assert stored["steps"] == CHAIN
    assert stored["format"] == "pipeline"
    assert [one["name"] for one in stored["outputs"]] == list(Y)
