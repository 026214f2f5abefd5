"""Layers of one input as one product: the same outputs by fewer products, and no layer that is not alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.workers.generation.joined_linears import JoinedLinear, join_linears
from tests.workers.generation.architectures import decoder
from tests.workers.generation.engines import GREEDY, open_engine, prompts_of, token_ids


class Products(TorchDispatchMode):
    """Counts products of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += func.overloadpacket is torch.ops.aten.linear
        return func(*args, **(kwargs or {}))


class Projections(torch.nn.Module):
    """Three layers of one input, with or without a bias."""

    def __init__(self, *, has_bias: bool = False, key_inputs: int = 8) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(8, 12, bias=has_bias)
        self.k_proj = torch.nn.Linear(key_inputs, 4, bias=has_bias)
        self.v_proj = torch.nn.Linear(8, 6, bias=has_bias)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(values), self.k_proj(values), self.v_proj(values)


def evaluated(module: torch.nn.Module) -> Any:
    torch.manual_seed(1)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    return module.eval()


@pytest.mark.parametrize("has_bias", [False, True])
def test_joined_layers_compute_the_same_in_one_product(has_bias: bool):
    """Weights, biases and the state dict are the same as before; an input is computed once for all three."""
    module = evaluated(Projections(has_bias=has_bias))
    values = torch.randn(5, 8)
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with torch.inference_mode():
        expected = module(values)
        assert join_linears(module) == 1
        with Products() as products:
            found = module(values)
    assert products.number == 1
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    assert all(torch.equal(tensor, state[name]) for name, tensor in module.state_dict().items())
    assert module.q_proj.weight.untyped_storage().data_ptr() == module.v_proj.weight.untyped_storage().data_ptr()


def test_no_output_is_given_twice_or_to_another_input():
    """A layer that is called again, or with another input, computes for that call; nothing is kept for later."""
    module = evaluated(Projections())
    one, other = torch.randn(5, 8), torch.randn(3, 8)
    with torch.inference_mode():
        expected = [[layer(values) for values in (one, other)] for layer in (module.q_proj, module.k_proj)]
        join_linears(module)
        with Products() as products:
            found = [[layer(values) for values in (one, other)] for layer in (module.q_proj, module.k_proj)]
            again = module.k_proj(other)
        assert products.number == 5
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(again, expected[1][1])
        module(one)
    joined = module.q_proj.joined
    assert joined._input is None
    assert joined._outputs == [None] * 3


def test_layers_that_are_not_alike_stay_as_they_are():
    """Another size of input, a hook, a weight that is shared, a class of its own, or a missing neighbour."""
    others = [evaluated(Projections(key_inputs=9)), *(evaluated(Projections()) for _ in range(4))]
    others[1].k_proj.register_forward_hook(lambda *_: None)
    others[2].k_proj.weight = others[2].v_proj.weight
    others[3].v_proj = type("Own", (torch.nn.Linear,), {})(8, 6, bias=False).eval()
    del others[4].v_proj
    assert [join_linears(other) for other in others] == [0] * 5
    assert not any(isinstance(layer, JoinedLinear) for other in others for layer in other.modules())


@pytest.mark.parametrize("name", ["Llama", "Qwen2", pytest.param("Gemma2", marks=pytest.mark.slow)])
def test_engine_writes_the_same_with_joined_layers(name: str):
    """Qwen2 has biases. Three layers have two joined weights each."""
    written = []
    for choice, number in (("off", 0), ("on", 6)):
        engine = open_engine(decoder(name), kv_cache_mb=4, page_size=4, joined_linears=choice)
        assert engine.joined_linears == number
        written.append(token_ids(engine.generate(prompts_of(3, 17, 30), GREEDY)))
    assert written[0] == written[1]


@pytest.mark.slow
def test_compiled_model_has_one_product_for_joined_layers():
    """Torch's compiler sees through the layers: it makes one graph, and the same outputs, of each call."""
    module = evaluated(Projections())
    values = torch.randn(5, 8)
    with torch.inference_mode():
        expected = module(values)
    join_linears(module)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append([node.target for node in graph.graph.nodes].count(torch._C._nn.linear))
        return graph.forward

    compiled = torch.compile(module, backend=backend)
    for _ in range(2):
        with torch.inference_mode():
            torch.testing.assert_close(compiled(values), expected)
    assert graphs == [1]
