"""One suite over the adapter of every framework (AR-042, AR-043), then the tests of each."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers

from penstock.registry.errors import InvalidInput
from penstock.workers.frameworks.adapters import Adapter, OnnxAdapter, PyTorchAdapter, TransformersAdapter, adapt
from tests.workers.runtime.formats import affine, affine_graph, save_bert

X = np.random.default_rng(3).standard_normal((2, 4), np.float32)


@dataclass
class Case:
    """A real model, how it is called, and the adapter that it gets."""

    model: Any
    arguments: tuple[Any, ...]
    adapter: type[Adapter]
    attribute: str
    is_copyable: bool = True

    def entry(self, *arguments: Any) -> Any:
        """The model called without any adapter."""
        return self.model.run(*arguments) if self.adapter is OnnxAdapter else self.model(*arguments)

    def native(self) -> Any:
        """The model's own answer."""
        return plain(self.entry(*self.arguments))


def plain(answer: Any) -> Any:
    """An answer that can be compared."""
    if isinstance(answer, torch.Tensor):
        return answer.tolist()
    return [one.tolist() if isinstance(one, np.ndarray) else one for one in answer]


def pytorch(folder: Path) -> Case:
    return Case(torch.nn.Linear(4, 4), (torch.from_numpy(X),), PyTorchAdapter, "in_features")


def pipeline(folder: Path) -> Case:
    save_bert(folder / "bert", "BertForSequenceClassification")
    make: Any = transformers.pipeline
    model = make("text-classification", model=str(folder / "bert"), device="cpu")
    return Case(model, (["abc", "zz top"],), TransformersAdapter, "tokenizer")


def onnx(folder: Path) -> Case:
    session = onnxruntime.InferenceSession(affine_graph().SerializeToString(), providers=["CPUExecutionProvider"])
    return Case(session, (["y"], {"x": X}), OnnxAdapter, "get_inputs", is_copyable=False)


@pytest.fixture(scope="module", params=[pytorch, pipeline, onnx], ids=lambda make: make.__name__)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    made: Case = request.param(tmp_path_factory.mktemp("model"))
    return made


@pytest.fixture
def adapter(case: Case) -> Adapter:
    return adapt(case.model)


def test_each_framework_has_its_adapter(case: Case, adapter: Adapter):
    """The model's class decides, and the adapter says which framework it serves."""
    assert type(adapter) is case.adapter
    assert adapter.__wrapped__ is case.model
    assert adapter.framework == case.adapter.framework


def test_answers_are_those_of_the_model_itself(case: Case, adapter: Adapter):
    """The same arguments give the same answer, and each call counts one."""
    assert plain(adapter(*case.arguments)) == case.native()
    assert plain(adapter(*case.arguments)) == case.native()
    assert adapter.call_count == 2


def test_attributes_pass_through(case: Case, adapter: Adapter):
    """The adapter has the model's attributes, and isinstance takes it for the model."""
    assert getattr(adapter, case.attribute) == getattr(case.model, case.attribute)
    assert isinstance(adapter, type(case.model))


def test_observers_are_told(case: Case):
    """Arguments before, the result after."""
    seen: list[Any] = []
    adapter = adapt(
        case.model,
        before=lambda args, kwargs: seen.append(args[0]),
        after=lambda result, seconds: seen.append(plain(result)),
    )
    adapter(*case.arguments)
    assert seen[0] is case.arguments[0]
    assert seen[1] == case.native()


def test_what_the_model_raises_passes_through(case: Case, adapter: Adapter):
    """With its own class, whatever that is."""
    with pytest.raises(Exception) as own:  # noqa: PT011 - each library has its own
        case.entry(None)
    with pytest.raises(type(own.value)):
        adapter(None)


def pickled(adapter: Any) -> Any:
    """What another process would get."""
    return pickle.loads(pickle.dumps(adapter))  # noqa: S301 - its own bytes


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_answer_alike(case: Case, adapter: Adapter, copied: Callable[[Any], Any]):
    """An adapter can be copied and pickled wherever its model can."""
    if not case.is_copyable:
        with pytest.raises(TypeError):
            copied(case.model)
        return
    other = copied(adapter)
    assert type(other) is case.adapter
    assert other.__wrapped__ is not case.model
    assert (plain(other(*case.arguments)), other.call_count) == (case.native(), 1)


@pytest.mark.parametrize("wrong", [PyTorchAdapter, TransformersAdapter, OnnxAdapter])
def test_adapter_refuses_models_of_another_framework(case: Case, wrong: Any):
    """The error names the framework that was found and the one that is expected."""
    if wrong is case.adapter:
        return
    if wrong is PyTorchAdapter and case.adapter is TransformersAdapter:
        assert wrong(case.model)(*case.arguments)
        return
    with pytest.raises(InvalidInput, match=rf"^A \w+ is of {case.adapter.framework}\. Expected"):
        wrong(case.model)


def test_hooks_of_a_module_fire():
    """The adapter calls through `Module.__call__` (AR-008), also for hooks that are set later."""
    module = torch.nn.Linear(4, 4)
    adapter = PyTorchAdapter(module)
    fired: list[str] = []
    module.register_forward_pre_hook(lambda module, args: fired.append("pre"))
    module.register_forward_hook(lambda module, args, output: fired.append("post"))
    x = torch.from_numpy(X)
    assert adapter(x).tolist() == module(x).tolist()
    assert fired == ["pre", "post"] * 2


def test_module_stays_trainable_behind_its_adapter():
    """Gradients, state and modes are the module's own."""
    module = torch.nn.Linear(4, 1)
    adapter = PyTorchAdapter(module)
    adapter(torch.from_numpy(X)).sum().backward()
    assert module.weight.grad is not None
    adapter.eval()
    assert not module.training
    assert list(adapter.state_dict()) == ["weight", "bias"]


def test_run_of_a_session_is_counted_as_well():
    """Code written for sessions calls `run`, with or without names of its arguments (AR-010)."""
    session = onnxruntime.InferenceSession(affine_graph().SerializeToString(), providers=["CPUExecutionProvider"])
    adapter = OnnxAdapter(session)
    (found,) = adapter.run(None, {"x": X})
    np.testing.assert_allclose(found, affine(X), rtol=1e-5, atol=1e-6)
    adapter.run(output_names=["y"], input_feed={"x": X})
    assert adapter.call_count == 2


def test_transformers_models_have_an_adapter_of_their_own(tmp_path: Path):
    """A model without its pipeline is called like the module that it is (AR-009)."""
    save_bert(tmp_path / "bert", "BertForSequenceClassification")
    model = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "bert", local_files_only=True)
    adapter = adapt(model)
    assert type(adapter) is TransformersAdapter
    ids = torch.tensor([[2, 5, 3]])
    with torch.inference_mode():
        assert adapter(input_ids=ids).logits.tolist() == model(input_ids=ids).logits.tolist()
