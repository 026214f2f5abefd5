"""Linear layers with packed weights compute what nn.Linear computes, or are not made."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from penstock.workers.runtime import prepacked, unpadded
from penstock.workers.runtime.compilable import CompilationRefused
from penstock.workers.runtime.forms import WithProvenance, thread_copy_of
from penstock.workers.runtime.prepacked import PrepackedLinear, can_prepack, prepack
from penstock.workers.runtime.pytorch import PyTorchRuntime
from penstock.workers.runtime.torch_device import sharing_weights
from penstock.workers.runtime.transformers import EncoderRuntime
from tests.servers import ROOT, leave_out
from tests.workers.runtime.formats import opened

WIDTH = 24
ROWS = 32


pytestmark = pytest.mark.usefixtures("packing_operators")


@pytest.fixture
def mlp() -> Iterator[PyTorchRuntime]:
    runtime = opened(ROOT / "models" / "mlp" / "1")
    assert isinstance(runtime, PyTorchRuntime)
    yield runtime
    runtime.close()


def rows(count: int = ROWS, width: int = WIDTH) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(3))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return make().eval()


def outputs_of(module: nn.Module, *inputs: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        outputs: torch.Tensor = module(*inputs)
    return outputs


def packed_layers(module: nn.Module) -> list[PrepackedLinear]:
    return [one for one in module.modules() if isinstance(one, PrepackedLinear)]


def count_multiplications(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each use of the operator from now on: whether it computed a GELU too."""
    used: list[bool] = []
    multiply = prepacked._multiply

    def counted(*arguments: Any, has_gelu: bool) -> torch.Tensor:
        used.append(has_gelu)
        return multiply(*arguments, has_gelu=has_gelu)

    monkeypatch.setattr(prepacked, "_multiply", counted)
    return used


# MiniLM


@pytest.mark.parametrize("batch", [1, 8, pytest.param(32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("words", [1, 6, 30, pytest.param(120, marks=pytest.mark.slow)])
def test_minilm_with_packed_weights_is_exact(minilm: EncoderRuntime, batch: int, words: int):
    """Every vector is that of the eager model to 1e-5, with and without padding (AR-055)."""
    form = minilm.candidates(None)["prepacked"]()
    alike = ["word " * words] * batch
    mixed = ["word " * (1 + number % words) for number in range(batch)]
    for texts in (alike, mixed):
        batch_of = minilm.prepare([{"text": np.array(texts, object)}])
        expected = minilm.run(batch_of)["embedding"]
        np.testing.assert_allclose(form(batch_of)["embedding"], expected, rtol=0, atol=1e-5)


@pytest.fixture
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """MiniLM is an encoder of a kind that is not known to run without padding."""
    monkeypatch.setattr(unpadded, "_why_unknown", lambda _: "found another one")


@pytest.mark.usefixtures("padded")
def test_encoder_of_any_kind_uses_the_packed_weights_and_fuses_each_gelu(
    minilm: EncoderRuntime, monkeypatch: pytest.MonkeyPatch
):
    """One multiplication a layer by the operator, six of them with their GELU; the pooler, of two rows, is dense."""
    form = minilm.candidates(None)["prepacked"]()
    assert isinstance(form, WithProvenance)
    assert (form.made["packed_layers"], form.made["fused_activations"]) == (37, 6)
    used = count_multiplications(monkeypatch)
    batch = minilm.prepare([{"text": np.array(["word " * 20] * 2, object)}])
    vectors = form(batch)["embedding"]
    assert (len(used), sum(used)) == (36, 6)
    np.testing.assert_allclose(vectors, minilm.run(batch)["embedding"], rtol=0, atol=1e-5)


def test_packing_leaves_the_serving_model_as_it_is(minilm: EncoderRuntime):
    """The author's module has its own classes, activations and weights afterwards, and shares the weights only."""
    assert minilm.model is not None
    before = {name: type(one) for name, one in minilm.model.named_modules()}
    numbers = {name: weight.clone() for name, weight in minilm.model.named_parameters()}
    minilm.candidates(None)["prepacked"]()
    assert {name: type(one) for name, one in minilm.model.named_modules()} == before
    assert all(torch.equal(weight, numbers[name]) for name, weight in minilm.model.named_parameters())


@pytest.mark.usefixtures("padded")
def test_packed_bf16_points_where_fp32_does(minilm: EncoderRuntime):
    """The bf16 form of any encoder packs its own weights, and both its attentions read the same ones."""
    form = minilm._reduced_on_cpu()
    assert isinstance(form, WithProvenance)
    if not form.made:
        leave_out("this build of torch packs no bf16")
    assert (form.made["packed_layers"], form.made["fused_activations"]) == (37, 6)
    assert form.made["memory_growth_mb"] == pytest.approx(21.53, abs=0.01)
    batch = minilm.prepare([{"text": np.array(["word " * length for length in (3, 40, 120, 180)], object)}])
    ours, exact = form(batch)["embedding"], minilm.run(batch)["embedding"]
    assert 0.999 <= (ours * exact).sum(axis=1).min() < 1 - 1e-7


# Modules


class Shared(nn.Module):
    """One weight in two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.second(self.first(x).tanh())
        return outputs


class TiedToEmbedding(nn.Module):
    """The weight of an embedding, which the head multiplies by."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.head(x + self.embedding.weight.mean(0))
        return outputs


class Doubled(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Residual(nn.Module):
    """The GELU is not all that reads the layer's output."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dense(x)
        outputs: torch.Tensor = hidden + self.act(hidden)
        return outputs


class Returning(Residual):
    """Returns the layer's output beside the GELU's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def both() -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.dense(x)
            return hidden, self.act(hidden)

        return torch.cat(both())


class Ignoring(Residual):
    """Calls the GELU and returns the layer's output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.dense(x)
        self.act(hidden)
        return hidden


class BeforeTheLayer(Residual):
    """The GELU comes first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.dense(self.act(x))
        return outputs


class Twice(Residual):
    """One activation after two layers, and one of them runs twice."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.dense(self.act(self.dense(x)))
        return outputs


class Elsewhere(nn.Module):
    """A layer that another part uses without its GELU."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.also = self.block[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.also(self.block(x))
        return outputs


class Looking(Residual):
    """Takes another path by what it sees."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dense(x)
        outputs: torch.Tensor = self.act(hidden) if hidden.shape[0] < ROWS else hidden
        return outputs


class Switched(Residual):
    """Its own forward is replaced on the object."""

    def __init__(self) -> None:
        super().__init__()
        self.forward = self.without  # type: ignore[method-assign]

    def without(self, x: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.dense(x)
        return outputs


def with_hook(kind: str) -> Callable[[], nn.Module]:
    """A layer whose hook changes what goes in or comes out."""

    def make() -> nn.Module:
        layer = nn.Linear(WIDTH, WIDTH)
        if kind == "before":
            layer.register_forward_pre_hook(lambda _, given: (given[0] * 3,))
        else:
            layer.register_forward_hook(lambda _, given, outputs: outputs + 1)
        return nn.Sequential(layer, nn.GELU())

    return make


def with_hooked_gelu() -> nn.Module:
    activation = nn.GELU()
    activation.register_forward_hook(lambda _, given, outputs: outputs - given[0])
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), activation)


def with_own_forward() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.forward = lambda input: input * 2  # type: ignore[method-assign]
    return nn.Sequential(layer, nn.GELU())


def parametrized() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)), nn.GELU())


def in_training() -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())
    # `eval` of the model reaches no module that keeps itself in training.
    module[0].train = lambda mode=True: module[0]  # type: ignore[method-assign]
    return module


MODULES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    # a module, its layers that are packed, and its activations that are fused
    "a layer and its GELU": (lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU(), nn.Linear(40, 8)), 2, 1),
    "no bias": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.GELU()), 1, 1),
    "one output": (lambda: nn.Linear(WIDTH, 1), 1, 0),
    "another activation": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()), 1, 0),
    "GELU by tanh": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU("tanh")), 1, 0),
    "dropout between": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.GELU()), 1, 0),
    "float64": (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=torch.float64), nn.GELU()).float().double(), 0, 0),
    "a subclass": (lambda: nn.Sequential(Doubled(WIDTH, WIDTH), nn.GELU()), 0, 0),
    "a parametrized weight": (parametrized, 0, 0),
    "a forward of the layer's own": (with_own_forward, 0, 0),
    "a hook before": (with_hook("before"), 0, 0),
    "a hook after": (with_hook("after"), 0, 0),
    "a hook at the GELU": (with_hooked_gelu, 1, 0),
    "in training": (in_training, 0, 0),
    "a shared weight": (Shared, 2, 0),
    "a weight tied to an embedding": (TiedToEmbedding, 1, 0),
    "a residual": (Residual, 1, 0),
    "an output beside": (Returning, 1, 0),
    "an output that the GELU is not": (Ignoring, 1, 0),
    "a GELU before": (BeforeTheLayer, 1, 0),
    "a layer that runs twice": (Twice, 1, 0),
    "a layer used elsewhere": (Elsewhere, 1, 0),
    "a path by shape": (Looking, 1, 0),
    "a forward of the object's own": (Switched, 1, 0),
}


@pytest.mark.parametrize("kind", MODULES)
def test_module_answers_as_before_or_is_not_packed(kind: str):
    """Whatever surrounds the layer, the outputs stay; what is not a plain layer stays as it is."""
    make, layers, activations = MODULES[kind]
    module = seeded(make)
    given = rows().double() if kind == "float64" else rows()
    expected = outputs_of(module, given)
    form = sharing_weights(module)
    assert can_prepack(form) is (layers > 0)
    if layers:
        packing = prepack(form)
        assert (packing.layers, packing.activations) == (layers, activations)
    else:
        with pytest.raises(CompilationRefused, match="Found no linear layer that can be packed"):
            prepack(form)
    assert len(packed_layers(form)) == layers
    torch.testing.assert_close(outputs_of(form, given), expected, rtol=1e-5, atol=1e-6)
    assert not packed_layers(module)


def test_shared_weight_is_packed_once():
    """Its bytes count once, as they are held once."""
    form = seeded(Shared)
    assert prepack(form).nbytes == WIDTH * WIDTH * 4
    first, second = packed_layers(form)
    assert first.packed is second.packed


INPUTS: dict[str, tuple[torch.Tensor, bool]] = {
    # values, and whether the packed weight is used
    "rows": (rows(), True),
    "the fewest rows": (rows(8), True),
    "fewer rows": (rows(7), False),
    "one row without a batch": (rows(1)[0], False),
    "no rows": (rows(0), False),
    "three dimensions": (rows().reshape(4, 8, WIDTH), True),
    "transposed": (rows(WIDTH, ROWS).t(), True),
    "every second row": (rows(2 * ROWS)[::2], True),
    "one row, repeated": (rows(1).expand(ROWS, WIDTH), True),
    "a view with an offset": (rows(ROWS, WIDTH + 4)[:, 4:], True),
    "infinite": (torch.full((ROWS, WIDTH), torch.inf), True),
    "a parameter": (nn.Parameter(rows(), requires_grad=False), False),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_inputs_of_any_layout_give_the_same_outputs(kind: str, monkeypatch: pytest.MonkeyPatch):
    """The operator takes those that it is faster for, and nn.Linear computes the others."""
    values, is_packed = INPUTS[kind]
    module = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, 40), nn.GELU()))
    form = sharing_weights(module)
    prepack(form)
    used = count_multiplications(monkeypatch)
    found = outputs_of(form, values)
    torch.testing.assert_close(found, outputs_of(module, values), rtol=1e-5, atol=1e-6, equal_nan=True)
    assert used == [True] * is_packed


def test_inputs_that_the_layer_refuses_are_refused_in_its_words():
    """A wrong width or dtype raises what nn.Linear raises."""
    module = seeded(lambda: nn.Linear(WIDTH, 40))
    form = sharing_weights(module)
    prepack(form)
    for wrong in (rows(ROWS, WIDTH + 1), rows().double(), rows().int()):
        with pytest.raises(RuntimeError) as theirs:
            outputs_of(module, wrong)
        with pytest.raises(RuntimeError) as ours:
            outputs_of(form, wrong)
        assert str(ours.value) == str(theirs.value)


def test_weight_that_the_model_changes_is_read_again():
    """A packed weight is a copy: after a change in place the layer's own weight counts."""
    form = seeded(lambda: nn.Linear(WIDTH, WIDTH))
    prepack(form)
    (layer,) = packed_layers(form)
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(outputs_of(form, rows()), nn.functional.linear(rows(), layer.weight, layer.bias))


def test_weight_that_the_model_replaces_is_read_again():
    """Also where the new weight was changed as often as the packed one."""
    form = seeded(lambda: nn.Linear(WIDTH, WIDTH))
    prepack(form)
    (layer,) = packed_layers(form)
    other = nn.Parameter(layer.weight.detach() * 3)
    with torch.no_grad():
        while other._version < layer.packed.version:
            other.add_(0)
    layer.weight = other
    assert torch.equal(outputs_of(form, rows()), nn.functional.linear(rows(), other, layer.bias))


def test_gradients_and_autocast_are_those_of_the_layer():
    """Code of a model may ask for either inside its forward."""
    module = seeded(lambda: nn.Linear(WIDTH, WIDTH))
    form = sharing_weights(module)
    prepack(form)
    given = rows().requires_grad_()
    form(given).sum().backward()
    assert given.grad is not None
    with torch.autocast("cpu", torch.bfloat16):
        assert outputs_of(form, rows()).dtype == torch.bfloat16
        torch.testing.assert_close(outputs_of(form, rows()), outputs_of(module, rows()))


def test_copies_of_a_form_share_its_packed_weights():
    """A copy for another thread costs no memory, and answers alike."""
    form = seeded(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()))
    prepack(form)
    other = sharing_weights(form)
    assert other is not form
    assert packed_layers(other)[0].packed is packed_layers(form)[0].packed
    assert torch.equal(outputs_of(other, rows()), outputs_of(form, rows()))
    # A copy with weights of its own must not read the first one's packed weights.
    own = copy.deepcopy(form)
    with torch.no_grad():
        packed_layers(form)[0].weight.zero_()
    assert outputs_of(own, rows()).abs().sum() > 0


def test_weights_beyond_the_limit_are_refused_before_they_are_packed(monkeypatch: pytest.MonkeyPatch):
    """The limit is that of the safety monitor for compiled forms, and nothing is allocated above it."""
    from penstock.workers.compilation import TorchCompileSafetyMonitor

    limit = prepacked.MOST_PACKED_BYTES
    assert limit == TorchCompileSafetyMonitor().memory_growth_threshold_mb * 1e6
    monkeypatch.setattr(prepacked, "MOST_PACKED_BYTES", 4 * WIDTH * WIDTH - 1)
    monkeypatch.setattr(prepacked, "_packed", lambda _: pytest.fail("a weight was packed"))
    form = seeded(lambda: nn.Linear(WIDTH, WIDTH))
    with pytest.raises(CompilationRefused, match="The packed weights would take 0 MB, expected at most 0"):
        prepack(form)
    assert not packed_layers(form)


# Capability


def removed(*_: object) -> torch.Tensor:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")


def other_arguments(_: object) -> torch.Tensor:
    raise AssertionError("the signature differs")


def other_meaning(values: torch.Tensor, packed: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.zeros(len(values), 32)


@pytest.mark.parametrize("operator", [None, removed, other_arguments, other_meaning])
def test_without_the_operators_there_is_no_such_form(
    minilm: EncoderRuntime, mlp: PyTorchRuntime, monkeypatch: pytest.MonkeyPatch, operator: object
):
    """Operators that are absent, raise, take other arguments or compute something else make no candidate, no error."""
    reorder = torch.ops.mkldnn._reorder_linear_weight
    other = SimpleNamespace() if operator is None else SimpleNamespace(_linear_pointwise=operator)
    if operator is not None:
        other._reorder_linear_weight = reorder
    monkeypatch.setattr(torch.ops, "mkldnn", other)
    prepacked._has_operators.cache_clear()
    try:
        for runtime in (minilm, mlp):
            assert "prepacked" not in runtime.candidates(None)
        form = minilm._reduced_on_cpu()
        assert isinstance(form, WithProvenance)
        assert form.made == {}
    finally:
        prepacked._has_operators.cache_clear()


def test_module_of_a_package_is_packed_too(mlp: PyTorchRuntime):
    """A `pytorch` package has the form as well; its copy for another thread is another instance."""
    form = mlp.candidates(None)["prepacked"]()
    assert isinstance(form, WithProvenance)
    assert form.made["packed_layers"]
    batch = mlp.prepare([{"x": rows(ROWS, 384).numpy()}])
    expected = mlp.run(batch)["logits"]
    other = thread_copy_of(form)
    assert isinstance(other, WithProvenance)
    assert other.forward is not form.forward
    for one in (form, other):
        np.testing.assert_allclose(one(batch)["logits"], expected, rtol=1e-5, atol=1e-5)


def test_package_of_another_precision_is_not_packed(models_root: Path):
    """The form is for fp32: the outputs of other formats differ by more than the tolerance."""
    from tests.workers.runtime.test_encoder import write_encoder

    folder = write_encoder(models_root)
    with (folder / "model.yaml").open("a") as spec:
        spec.write("precision: bf16\n")
    runtime = opened(folder)
    assert isinstance(runtime, EncoderRuntime)
    assert "prepacked" not in runtime.candidates(None)
    runtime.close()
