"""The check of a package: loaded, warmed up and run as by a worker, without a broker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import yaml

from penstock.compose.authoring.check import CheckTarget, FailedForward, check_package, own_traceback
from penstock.registry.errors import ConfigurationError, InvalidInput, MissingRequirement, ModelError
from tests.packages import write_double, write_package, write_raiser
from tests.servers import ROOT

CPU = CheckTarget("cpu", 1)


def test_each_step_is_told_and_the_report_has_the_figures(models_root: Path):
    """The lines name the files, the load, the job and its outputs."""
    told: dict[str, str] = {}
    report = check_package(write_double(models_root), CPU, None, told.__setitem__)
    assert list(told) == ["model.yaml", "inputs", "outputs", "files", "load", "example", "run", "latency"]
    assert (told["inputs"], told["example"]) == ("x float32 (batch, 4)", "x float32 (1, 4)")
    assert told["load"].endswith("on cpu; warmed up, outputs as declared")
    assert told["files"].startswith("2 files, ")
    assert report.as_data()["outputs"] == {"y": {"dtype": "float32", "shape": [1, 4]}}
    assert report.forwards >= 1


def test_sample_is_the_job(models_root: Path):
    """Its values reach the model, and its rows come back."""
    report = check_package(write_double(models_root), CPU, {"x": [[1, 2, 3, 4], [5, 6, 7, 8]]})
    np.testing.assert_array_equal(report.outputs["y"], [[2, 4, 6, 8], [10, 12, 14, 16]])


def test_wrong_sample_is_refused_with_its_input_before_anything_is_loaded(models_root: Path):
    """The refusal names the input, as a client's does."""
    told: dict[str, str] = {}
    with pytest.raises(InvalidInput, match=r"^x: shape \(1, 3\)\. Expected \(batch, 4\), every extent"):
        check_package(write_double(models_root), CPU, {"x": [[1, 2, 3]]}, told.__setitem__)
    assert "load" not in told


def test_model_that_streams_is_run_to_its_end():
    """Its chunks are counted, and its result is compared with the declaration."""
    report = check_package(ROOT / "models" / "counter" / "1", CPU, {"count": [3]})
    assert (report.chunks, report.outputs["total"].tolist()) == (3, [3])


@pytest.mark.parametrize(("heeds", "chunks", "outputs"), [(True, 32, ["y"]), (False, 64, [])])
def test_endless_stream_is_cancelled_and_then_closed(models_root: Path, heeds: bool, chunks: int, outputs: list[str]):
    """A model that streams until its job is cancelled does not hold the check."""
    source = f"""
    def build():
        def stream(inputs, ctx):
            while not (ctx.is_cancelled and {heeds}):
                yield {{}}
            return {{"y": inputs["x"]}}
        return stream
    """
    folder = write_package(models_root, "endless", source)
    document = yaml.safe_load((folder / "model.yaml").read_text()) | {"streams": True, "batching": {}}
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    report = check_package(folder, CPU)
    assert (report.chunks, sorted(report.outputs)) == (chunks, outputs)


def test_package_that_cannot_be_loaded_is_refused(models_root: Path):
    """The check finds what only a load finds."""
    with pytest.raises(ConfigurationError, match="found no function build"):
        check_package(write_package(models_root, "empty", "nothing = 1"), CPU)


def test_model_that_fails_for_the_sample_shows_its_own_lines(models_root: Path):
    """The traceback begins in the package: the author's mistake is there."""
    folder = write_raiser(models_root)
    with pytest.raises(FailedForward, match=r"^raiser/1: the model failed \(ValueError: a negative row\)") as failed:
        check_package(folder, CPU, {"x": [[-1, 0, 0, 0]]})
    shown = own_traceback(failed.value, folder)
    assert shown.startswith("Traceback (most recent call last):\n  File ")
    assert "model.py" in shown.splitlines()[1]
    assert shown.endswith("ValueError: a negative row\n")
    assert own_traceback(ModelError("no cause"), folder) == ""


def test_output_that_is_not_finite_is_refused(models_root: Path):
    """Such a job would fail in a worker, unless the package allows it."""
    source = "def build(): return lambda inputs: {'y': inputs['x'] + float('inf')}"
    folder = write_package(models_root, "infinite", source)
    with pytest.raises(ModelError, match=r"^Output y contains NaN or infinity"):
        check_package(folder, CPU, {"x": [[1, 1, 1, 1]]})
    document = yaml.safe_load((folder / "model.yaml").read_text())
    document["outputs"][0]["allow_nan"] = True
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    assert check_package(folder, CPU, {"x": [[1, 1, 1, 1]]}).outputs["y"][0, 0] == np.inf


def test_machine_that_lacks_the_device_is_told_apart(models_root: Path):
    """The package may be right: another machine can load it."""
    folder = write_double(models_root)
    document = yaml.safe_load((folder / "model.yaml").read_text()) | {"device": "cuda"}
    (folder / "model.yaml").write_text(yaml.safe_dump(document))
    with pytest.raises(MissingRequirement, match="device: found cpu, expected cuda"):
        check_package(folder, CPU)
