"""Problems of the gateway -> gRPC's status codes, in one table, with the same text as over HTTP.

    error -> problems.py -> Problem -> Status(code, details, trailing metadata)

A refusal that ends by itself says when to come back: `retry-after` in seconds, and `grpc-retry-pushback-ms`, which
clients with a retry policy obey.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import grpc

from penstock.producers.gateway.problems import Problem, problem_of

__all__ = ["Status", "status_of"]

_CODES: Final = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    410: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    502: grpc.StatusCode.INTERNAL,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
    507: grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""By the status of HTTP."""
_OWN_CODES: Final = {
    "idempotency-conflict": grpc.StatusCode.ALREADY_EXISTS,
    # The inputs are valid, and too large for what the model computes.
    "non-finite-output": grpc.StatusCode.OUT_OF_RANGE,
    "queue-full": grpc.StatusCode.RESOURCE_EXHAUSTED,
}
"""Of problems for which gRPC has a narrower code."""


class Status(NamedTuple):
    """How a call failed. trailing: metadata with the problem's code, and when to come back."""

    code: grpc.StatusCode
    details: str
    trailing: tuple[tuple[str, str], ...]
    is_mistake: bool
    """Whether the gateway itself has failed."""


def status_of(error: Exception) -> Status:
    """The status of an error."""
    problem = problem_of(error)
    trailing = (("penstock-problem", problem.code), *_retry(problem))
    code = _OWN_CODES.get(problem.code) or _CODES[problem.status]
    return Status(code, f"{problem.title}: {problem.detail}", trailing, problem.status == 500)


def _retry(problem: Problem) -> tuple[tuple[str, str], ...]:
    for name, value in problem.headers:
        if name == b"retry-after":
            seconds = int(value)
            return ("retry-after", str(seconds)), ("grpc-retry-pushback-ms", str(seconds * 1000))
    return ()
