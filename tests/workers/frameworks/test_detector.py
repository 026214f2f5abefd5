"""Which framework a model belongs to (AR-027), and that asking imports none."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType
from typing import Any

import onnxruntime
import pytest
import torch
import transformers

from penstock.registry.errors import InvalidInput
from penstock.registry.package import load_package
from penstock.workers.frameworks.detector import FRAMEWORKS, detect_framework, framework_of_package
from tests.servers import ROOT
from tests.workers.runtime.formats import WRITERS, affine_graph


class OwnModule(torch.nn.Module):
    """A user's class."""


class OwnModel(transformers.BertModel):
    """A user's class over a library's."""


def tiny_bert(kind: Any) -> Any:
    return kind(
        transformers.BertConfig(
            vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
        )
    )


def session() -> onnxruntime.InferenceSession:
    return onnxruntime.InferenceSession(affine_graph().SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize(
    ("make", "framework"),
    [
        (lambda: torch.nn.Linear(1, 1), "pytorch"),
        (OwnModule, "pytorch"),
        (lambda: torch.compile(OwnModule()), "pytorch"),
        (lambda: tiny_bert(transformers.BertModel), "transformers"),
        (lambda: tiny_bert(OwnModel), "transformers"),
        (session, "onnxruntime"),
        (affine_graph, "onnxruntime"),
    ],
)
def test_model_objects_are_told_by_their_classes(make: Any, framework: str):
    """The nearest class decides: a transformers model is not taken for the torch module that it also is."""
    assert detect_framework(make()) == framework


@pytest.mark.parametrize("name", WRITERS)
def test_packages_are_told_by_their_format(models_root: Any, name: str):
    """`python` needs none."""
    framework = framework_of_package(load_package(WRITERS[name](models_root)))
    expected = {"onnx": "onnxruntime", "encoder": "transformers", "pipeline": "transformers", "python": None}
    assert framework == expected.get(name, "pytorch")
    assert framework is None or framework in FRAMEWORKS


def foreign(module: str, name: str) -> object:
    """An object of a class that says it comes from a library that is not here."""
    return type(name, (), {"__module__": module})()


@pytest.mark.parametrize(
    ("model", "text"),
    [
        (
            foreign("keras.src.models.sequential", "Sequential"),
            "A Sequential belongs to TensorFlow, which is not served",
        ),
        (foreign("tensorflow.python.module.module", "Module"), "A Module belongs to TensorFlow, which is not served"),
        (foreign("jax._src.api", "PjitFunction"), "A PjitFunction belongs to JAX, which is not served"),
        (foreign("sklearn.svm", "SVC"), "A SVC belongs to no framework that is served"),
        (3, "A int belongs to no framework that is served"),
        (ModuleType("torch"), "A module belongs to no framework that is served"),
    ],
)
def test_other_frameworks_are_refused_by_name(model: object, text: str):
    """TensorFlow and JAX are named, with the way out (CX-008)."""
    with pytest.raises(InvalidInput) as refused:
        detect_framework(model)
    assert str(refused.value) == (
        f"{text}. Expected a model of: onnxruntime, pytorch, transformers; "
        "TensorFlow and JAX models can be exported to ONNX"
    )


def test_class_of_the_name_of_a_framework_alone_is_none():
    """`torchvision_like` is not torch."""
    with pytest.raises(InvalidInput):
        detect_framework(foreign("torch_like.nn", "Module"))


def test_asking_imports_nothing():
    """What is not imported made no object, so nothing needs to be imported to tell."""
    program = (
        "import sys; from penstock.workers.frameworks import adapters, detector\n"
        "try: detector.detect_framework(object())\n"
        "except ValueError: pass\n"
        "print(sorted({'torch', 'transformers', 'onnxruntime', 'onnx', 'tensorflow', 'jax'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
