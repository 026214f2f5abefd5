"""A request of HTTP, as Ray's proxy gives it to a deployment: its fields, and the answer.

    {"inputs": {name: nested lists, or {dtype, shape, data | base64}}, "priority": "high"}   -> {"model", "outputs"}

Fields, outputs and errors are those of the HTTP gateway, in JSON. Starlette, which makes the request, makes the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeGuard

import msgspec

from penstock.producers.gateway.exchange import JSON
from penstock.producers.gateway.problems import PROBLEM_JSON, as_problem_json, problem_of
from penstock.producers.gateway.tensors import decoded, plain_inputs, write_outputs
from penstock.registry.errors import PenstockError
from penstock.registry.queues import PriorityName
from penstock.registry.tensors import Array

if TYPE_CHECKING:
    from starlette.responses import Response

__all__ = ["Request", "is_request", "outputs_answer", "problem_answer", "read_request"]


class Request(Protocol):
    """What is used of a request of Starlette."""

    async def body(self) -> bytes:
        """The whole body."""


class _Fields(msgspec.Struct, forbid_unknown_fields=True):
    inputs: dict[str, Any]
    priority: PriorityName = "normal"


def is_request(value: object) -> TypeGuard[Request]:
    """Whether a call came over HTTP. A request of Starlette is a mapping, too."""
    return callable(getattr(value, "body", None)) and callable(getattr(value, "json", None))


async def read_request(request: Request) -> tuple[dict[str, object], PriorityName]:
    """(inputs, priority) of a request. Raises InvalidInput."""
    fields = decoded(await request.body(), _Fields)
    return plain_inputs(fields.inputs), fields.priority


def outputs_answer(model: str, outputs: Mapping[str, Array]) -> Response:
    """200 with the outputs; those with NaN or infinity, which JSON lacks, have base64."""
    body, kind, _ = write_outputs(outputs, "json", {"model": model}, JSON)
    return _response(body, 200, {}, kind)


def problem_answer(error: PenstockError) -> Response:
    """The error as problem details (RFC 9457)."""
    problem = problem_of(error)
    headers = {name.decode(): value.decode() for name, value in problem.headers}
    return _response(as_problem_json(problem), problem.status, headers, PROBLEM_JSON)


def _response(body: bytes, status: int, headers: dict[str, str], kind: bytes) -> Response:
    # Only a program that has made a request of Starlette comes here.
    from starlette.responses import Response

    return Response(body, status, headers, kind.decode())
