"""The model that the name `default` stands for: the only one that generates texts, or the only one that embeds them.

A model that is named `default` goes first. With several models of a kind, the name stands for none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeAlias

from penstock.producers.gateway.fleet import GatewayClient
from penstock.registry.errors import UnknownModel
from penstock.registry.package import ModelSpec
from penstock.registry.package.signature import TensorSpec
from penstock.registry.tensors import STRING

__all__ = ["any_default", "embeds", "generates", "or_default", "vectors_of"]

Serves: TypeAlias = Callable[[ModelSpec], bool]
_NAME: Final = "default"


def generates(spec: ModelSpec) -> bool:
    """Whether a model generates texts."""
    return spec.generate is not None


def embeds(spec: ModelSpec) -> bool:
    """Whether a model has one required input of texts or of lists of tokens, and one output of vectors."""
    required = [tensor for tensor in spec.inputs if not tensor.optional]
    if generates(spec) or len(required) != 1 or len(vectors_of(spec)) != 1:
        return False
    (tensor,) = required
    return tensor.dtype == STRING or (tensor.dtype.startswith("int") and len(tensor.shape) == 2)


def vectors_of(spec: ModelSpec) -> list[TensorSpec]:
    """The outputs of vectors."""
    return [tensor for tensor in spec.outputs if tensor.dtype.startswith("float") and len(tensor.shape) == 2]


async def or_default(client: GatewayClient, model: str, serves: Serves, what: str) -> str:
    """`model`, or the name that `default` stands for among the models that `serves`.

    what: these models do, for the error. Raises UnknownModel, and BrokerUnavailable.
    """
    return model if model != _NAME else await _only(client, serves, what)


async def any_default(client: GatewayClient, model: str) -> str:
    """`model`; for `default` that of the text routes, without one that of embeddings, without both the only model.

    Raises UnknownModel, and BrokerUnavailable.
    """
    if model != _NAME:
        return model
    for serves in (generates, embeds):
        with suppress(UnknownModel):
            return await _only(client, serves, "")
    return await _only(client, lambda _: True, "are served")


async def _only(client: GatewayClient, serves: Serves, what: str) -> str:
    names = [each.spec.name for each in await client.models() if serves(each.spec)]
    if _NAME in names:
        return _NAME
    if len(names) != 1:
        raise UnknownModel(f"{len(names)} models {what}. Expected the name of one in place of {_NAME}")
    return names[0]
