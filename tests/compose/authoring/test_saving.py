"""Packages that are written from a model in memory: loaded once, complete or absent, and without a pickle."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.compose.authoring.check import CheckTarget, check_package
from penstock.package import save
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.package import load_package
from penstock.workers.runtime.torch_device import keeping_threads
from tests.compose.authoring.functions import build, double, forgetful, inner
from tests.servers import ROOT
from tests.workers.runtime.formats import affine, affine_graph

CPU = CheckTarget("cpu", 1)
SIGNATURE: dict[str, Any] = {
    "inputs": {"x": ("float32", ["batch", 4])},
    "outputs": [{"name": "y", "dtype": "float32", "shape": ["batch", 4]}],
}
X = np.random.default_rng(3).standard_normal((3, 4)).astype(np.float32)


class Branching(torch.nn.Module):
    """The trace of this module depends on the values of its example, and its source is no TorchScript."""

    def forward(self, x: torch.Tensor) -> Any:
        return next(x * 2 for _ in {"once"}) if x.sum() > 0 else x


class Unscriptable(torch.nn.Module):
    """The source of this module is no TorchScript, and its trace is right."""

    def forward(self, x):
        return next(x + number for number in {2})


def answered(folder: Path) -> Any:
    """The output of the package for X."""
    return check_package(folder, CPU, {"x": X}).outputs["y"]


def test_import_needs_no_framework():
    """A program that writes packages imports the framework of its model only."""
    code = "import sys, penstock; assert penstock.package.save; print({'torch', 'onnx'} & set(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown.stdout == "set()\n"


def test_function_is_saved_with_the_file_of_its_module(models_root: Path):
    """A worker runs the function's own source."""
    folder = save(double, path=models_root / "double" / "1", signature=SIGNATURE, fields={"concurrency": 2})
    assert sorted(file.name for file in folder.iterdir()) == ["functions.py", "model.yaml", "penstock_entry.py"]
    np.testing.assert_array_equal(answered(folder), X * 2)
    assert load_package(folder).spec.concurrency == 2


def test_module_is_saved_as_torchscript(models_root: Path):
    """The caller's module stays in its mode, and a worker needs no code of it."""
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).train()
    folder = save(module, path=models_root / "linear" / "1", signature=SIGNATURE)
    assert sorted(file.name for file in folder.iterdir()) == ["model.pt", "model.yaml"]
    with torch.inference_mode():
        np.testing.assert_allclose(answered(folder), module[0](torch.from_numpy(X)).numpy(), rtol=1e-5, atol=1e-6)
    assert module.training


def test_threads_of_the_caller_stay(models_root: Path):
    """A training that goes on after the save has as many threads as before, also in new threads."""
    with keeping_threads():
        torch.set_num_threads(3)
        save(torch.nn.Linear(4, 4), path=models_root / "linear" / "1", signature=SIGNATURE)
        assert torch.get_num_threads() == 3
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result(180) == 3


def test_module_whose_source_is_no_torchscript_is_traced(models_root: Path):
    """A trace that depends on the values of its example is refused, with the way out."""
    folder = save(Unscriptable(), path=models_root / "traced" / "1", signature=SIGNATURE)
    np.testing.assert_allclose(answered(folder), X + 2, rtol=1e-6)
    with pytest.raises(ConfigurationError, match=r"^Branching: its trace depends on the values .*, or build="):
        save(Branching(), path=models_root / "branching" / "1", signature=SIGNATURE)
    assert sorted(path.name for path in models_root.iterdir()) == ["traced"]


def test_module_with_its_build_is_saved_as_safetensors(models_root: Path):
    """`build` makes the module again, and the weights fill it."""
    module = build()
    folder = save(module, path=models_root / "linear" / "2", signature=SIGNATURE, build=build)
    assert sorted(file.name for file in folder.iterdir()) == ["functions.py", "model.safetensors", "model.yaml"]
    with torch.inference_mode():
        np.testing.assert_allclose(answered(folder), module(torch.from_numpy(X)).numpy(), rtol=1e-5, atol=1e-6)


def test_onnx_graph_has_its_own_signature(models_root: Path):
    """Names, dtypes and shapes are those of the graph."""
    folder = save(affine_graph(), path=models_root / "affine" / "1")
    spec = load_package(folder).spec
    assert [(one.name, one.dtype, one.shape) for one in spec.inputs] == [("x", "float32", ("batch", 4))]
    np.testing.assert_allclose(answered(folder), affine(X), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_encoder_is_saved_with_its_tokenizer(models_root: Path, tmp_path: Path):
    """The width of its embeddings is that of the model; a model without a tokenizer is refused."""
    import transformers

    from tests.workers.runtime.formats import save_bert

    save_bert(tmp_path / "bert", "BertModel")
    model = transformers.AutoModel.from_pretrained(tmp_path / "bert")
    with pytest.raises(InvalidInput, match=r"^tokenizer: found none"):
        save(model, path=models_root / "bert" / "1")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "bert")
    folder = save(model, path=models_root / "bert" / "1", tokenizer=tokenizer)
    assert load_package(folder).spec.outputs[0].shape == ("batch", 16)
    pipeline = transformers.pipeline("fill-mask", model=str(_masked(tmp_path)), device="cpu")
    outputs = {"inputs": {"text": ("string", ["batch"])}, "outputs": {"token_str": ("string", ["batch"])}}
    folder = save(pipeline, path=models_root / "mask" / "1", signature=outputs)
    assert load_package(folder).spec.task == "fill-mask"


def _masked(folder: Path) -> Path:
    from tests.workers.runtime.formats import save_bert

    save_bert(folder / "masked", "BertForMaskedLM")
    return folder / "masked"


def test_model_that_does_not_fit_its_signature_is_not_written(models_root: Path):
    """The package is loaded before it takes its place."""
    with pytest.raises(ConfigurationError, match=r"^wrong/1: The model returned the outputs: z\. Declared outputs: y$"):
        save(forgetful, path=models_root / "wrong" / "1", signature=SIGNATURE)
    assert list(models_root.iterdir()) == []


@pytest.mark.parametrize(
    ("model", "how", "text"),
    [
        ({"a": 1}, {}, "model: found dict, expected a function of a module's top level, "),
        (inner(), {}, "inner.<locals>.within: found a function inside another, expected one of a module's top level"),
        (double, {"signature": {"inputs": {}}}, "signature: outputs: expected exactly inputs and outputs"),
        (double, {"signature": {**SIGNATURE, "inputs": {"x": "float32"}}}, "inputs: 'x': found str, expected a dtype"),
        (double, {"signature": {**SIGNATURE, "inputs": 3}}, "inputs: found int, expected a mapping such as"),
        (double, {"signature": {**SIGNATURE, "inputs": {"x": ("f4", [])}}}, "inputs: x: dtype: found 'f4', expected"),
        (double, {"path": "Bad Name/1"}, "Bad model name 'Bad Name'"),
    ],
)
def test_other_arguments_are_refused(models_root: Path, model: object, how: dict[str, Any], text: str):
    """One line says what was found, and nothing is written."""
    arguments = {"path": "mine/1", "signature": SIGNATURE, **how}
    with pytest.raises(InvalidInput) as refused:
        save(model, **{**arguments, "path": models_root / arguments["path"]})
    assert str(refused.value).startswith(text)
    assert list(models_root.iterdir()) == []


def test_package_that_is_there_is_not_overwritten(models_root: Path):
    """Versions do not change: another one needs another path."""
    save(double, path=models_root / "double" / "1", signature=SIGNATURE)
    with pytest.raises(InvalidInput, match=r"^double/1 is there already\."):
        save(double, path=models_root / "double" / "1", signature=SIGNATURE)


def test_file_that_saves_itself_again_is_refused(models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A worker would run the whole file: a call of save() without a guard would not end."""
    (tmp_path / "unguarded.py").write_text(
        "from penstock.package import save\n"
        "def same(inputs):\n"
        "    return {'y': inputs['x']}\n"
        f"save(same, path={str(models_root / 'same' / '1')!r}, signature={SIGNATURE!r})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigurationError, match="Expected it below a __main__ guard"):
        __import__("unguarded")
    assert list(models_root.iterdir()) == []
