"""What the Open Inference Protocol says alike over REST and gRPC: the server, models, priorities and time-outs.

parameters of a request -> priority, deadline;  ServedModel, TensorSpec -> versions, platform, state, shape
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version as version_of
from typing import Any, Final

from penstock.producers.gateway.fleet import ServedModel
from penstock.producers.gateway.oip_tensors import DATATYPES
from penstock.registry.errors import InvalidInput
from penstock.registry.package.signature import TensorSpec
from penstock.registry.queues import PriorityName

__all__ = [
    "EXTENSIONS",
    "SERVER_NAME",
    "SERVER_VERSION",
    "deadline_s_of",
    "described",
    "platform_of",
    "priority_of",
    "state_of",
    "versions_of",
]

SERVER_NAME: Final = "penstock"
SERVER_VERSION: Final = version_of("penstock")
EXTENSIONS: Final = ["binary_tensor_data", "schedule_policy", "model_repository"]
_LONGEST_US: Final = 10**15
_PRIORITIES: Final[dict[int, PriorityName]] = {0: "normal", 1: "critical", 2: "high", 3: "normal"}
"""Triton's: 1 is the highest, 0 the model's default. All above 3 are low."""


def priority_of(parameters: Mapping[str, Any]) -> PriorityName:
    """The priority of a request. Raises InvalidInput."""
    value = parameters.get("priority", 0)
    if type(value) is not int or value < 0:
        raise InvalidInput("Bad parameter priority. Expected 0 for the default, or 1 for the highest, and above")
    return _PRIORITIES.get(value, "low")


def deadline_s_of(parameters: Mapping[str, Any]) -> float | None:
    """The seconds of `timeout`, which is in microseconds; 0 means none. Raises InvalidInput."""
    value = parameters.get("timeout", 0)
    if type(value) is not int or not 0 <= value <= _LONGEST_US:
        raise InvalidInput(f"Bad parameter timeout. Expected microseconds up to {_LONGEST_US}, or 0 for none")
    return value / 1e6 or None


def described(tensor: TensorSpec) -> tuple[str, list[int]]:
    """(datatype, shape) of a tensor; an extent that varies is -1."""
    return DATATYPES[tensor.dtype], [extent if isinstance(extent, int) else -1 for extent in tensor.shape]


def versions_of(model: ServedModel) -> list[str]:
    """The active version, and those that a worker has in memory."""
    return sorted({model.spec.version, *model.loaded})


def platform_of(model: ServedModel) -> str:
    """The format of its package."""
    return f"penstock_{model.spec.format}"


def state_of(model: ServedModel) -> str:
    """READY while a worker has it in memory."""
    return "READY" if model.is_loaded else "UNAVAILABLE"
