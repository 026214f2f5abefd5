"""Channels to the shared gateway, with the methods of its services."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
import pytest

from penstock.producers.gateway.rpc.messages import message
from tests.producers.gateway.conftest import GatewayStack

ROW = [1.0, 2.0, 3.0, 4.5]
TWICE = [2.0, 4.0, 6.0, 9.0]
INFER = "/inference.GRPCInferenceService/ModelInfer"
PREDICT = "/inference.InferenceService/Predict"
PATIENCE_S = 180.0
_Answer = {INFER: "ModelInferResponse", PREDICT: "PredictResponse"}


class Caller:
    """Unary calls on one channel."""

    def __init__(self, address: str) -> None:
        # Channels of one process share a connection otherwise.
        options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
        self.channel = grpc.insecure_channel(address, options)

    def call(self, method: str, request: Any, timeout: float = PATIENCE_S, **options: Any) -> Any:
        """(answer, trailing metadata). Raises grpc.RpcError."""
        data = request if isinstance(request, bytes) else request.SerializeToString()
        answer, call = self.channel.unary_unary(method).with_call(data, timeout, wait_for_ready=True, **options)
        return message(_Answer[method]).FromString(answer), dict(call.trailing_metadata())

    def refusal(self, method: str, request: Any, **options: Any) -> grpc.Call:
        """The error of a call that must fail."""
        error = self.refused(method, request, **options)
        assert error is not None
        return error

    def refused(self, method: str, request: Any, **options: Any) -> grpc.Call | None:
        """The error of a call; None for one that is answered."""
        try:
            self.call(method, request, **options)
        except grpc.RpcError as error:
            return cast(grpc.Call, error)
        return None


@pytest.fixture
def open_caller() -> Iterator[Callable[[str], Caller]]:
    """Callers of an address; they end with the test."""
    opened: list[Caller] = []

    def start(address: str) -> Caller:
        opened.append(Caller(address))
        return opened[-1]

    yield start
    for each in opened:
        each.channel.close()


@pytest.fixture
def rpc(stack: GatewayStack, open_caller: Callable[[str], Caller]) -> Caller:
    """A caller of the shared gateway."""
    return open_caller(stack.gateway.rpc)


def infer_request(model: str = "double", rows: Any = (ROW,), **fields: Any) -> Any:
    """One input `x` of rows of four numbers, as contents."""
    request = message("ModelInferRequest")(model_name=model, **fields)
    tensor = request.inputs.add(name="x", datatype="FP32", shape=[len(rows), 4])
    tensor.contents.fp32_contents.extend(number for row in rows for number in row)
    return request


def predict_request(row: Any = tuple(ROW), model: str = "double", **fields: Any) -> Any:
    """One row."""
    return message("PredictRequest")(inputs=row, model=model, **fields)
