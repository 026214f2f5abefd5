"""Errors -> HTTP statuses, in one table, and the body of an error: problem+json (RFC 9457).

    error -> Problem(status, title, detail, headers) -> as_problem_json, or the shape of another protocol

The detail says what was expected. It never has a stack, a path, a payload or the text of a model's own exception: that
is for the operators, who find it in the worker's log under the id of the job.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import msgspec

from penstock.producers.gateway.batches.block_file import FileDamaged
from penstock.producers.gateway.batches.file_store import NotFound, StoreFull
from penstock.producers.gateway.exchange import CallerRevoked, RequestRefused
from penstock.producers.gateway.limits import headers_of
from penstock.producers.gateway.revocations import REVOKED
from penstock.registry.errors import (
    BadApiKey,
    BrokerUnavailable,
    Cancelled,
    ClientUnusable,
    ConfigurationError,
    DeadlineExceeded,
    Expired,
    Forbidden,
    ForwardTimeout,
    IdempotencyConflict,
    InputRefused,
    InvalidInput,
    JobFailed,
    JobLost,
    ModelNotReady,
    NonFiniteOutput,
    NotPermitted,
    PenstockError,
    QueueFull,
    RateLimited,
    ResultGone,
    ResultTimeout,
    Retryable,
    Unauthorized,
    UnknownJob,
    UnknownModel,
)

__all__ = ["PROBLEM_JSON", "Problem", "as_problem_json", "problem_of"]

PROBLEM_JSON: Final = b"application/problem+json"
_RETRY_S: Final = 1
_LONGEST_RETRY_S: Final = 3600
_OF_BROKER: Final = "The broker does not answer. Expected a retry"
_OF_MODEL: Final = (
    "The model failed. Expected inputs that it can compute; its operators find the reason under the job's id"
)

_TITLES: Final = {
    400: "bad request",
    401: "unauthorized",
    403: "forbidden",
    404: "not found",
    405: "method not allowed",
    408: "request timeout",
    409: "conflict",
    410: "gone",
    413: "request too large",
    415: "unsupported media type",
    422: "invalid input",
    429: "too many requests",
    500: "internal error",
    502: "the model failed",
    503: "service unavailable",
    504: "timeout",
    507: "insufficient storage",
}


class Problem(NamedTuple):
    """How a request failed. code: a name for programs, such as `unknown-model`."""

    status: int
    code: str
    title: str
    detail: str
    headers: tuple[tuple[bytes, bytes], ...] = ()


_BY_KIND: Final[tuple[tuple[type[Exception], int, str, str], ...]] = (
    # The first row that fits decides. An empty text: the error's own, which says what was expected.
    # A name that no model can have is unknown, too.
    (UnknownModel, 404, "unknown-model", ""),
    (InvalidInput, 422, "invalid-input", ""),
    (InputRefused, 422, "invalid-input", ""),
    (DeadlineExceeded, 422, "invalid-input", ""),
    (UnknownJob, 404, "unknown-job", ""),
    (NotFound, 404, "not-found", ""),
    (FileDamaged, 410, "file-damaged", ""),
    (StoreFull, 507, "store-full", ""),
    (ResultGone, 410, "result-gone", ""),
    (JobLost, 410, "job-lost", ""),
    # draft-ietf-httpapi-idempotency-key-header, 2.7: a key with another payload.
    (IdempotencyConflict, 422, "idempotency-conflict", ""),
    (QueueFull, 503, "queue-full", ""),
    (BadApiKey, 401, "unauthorized", ""),
    (CallerRevoked, 401, "unauthorized", REVOKED),
    (NotPermitted, 403, "forbidden", ""),
    (RateLimited, 429, "rate-limited", ""),
    # These two are about the keys of this process, and no matter of the caller.
    (Unauthorized, 503, "not-ready", "The gateway has no keys of a live worker. Expected a retry"),
    (Forbidden, 503, "not-ready", "The gateway has no right to this. Expected a retry"),
    (ModelNotReady, 503, "model-not-ready", ""),
    (BrokerUnavailable, 503, "broker-unavailable", _OF_BROKER),
    (Retryable, 503, "not-ready", "Expected a retry"),
    (ClientUnusable, 503, "stopping", "This process stops. Expected a retry"),
    (ConfigurationError, 503, "not-ready", "The gateway cannot work with its settings. Expected a retry"),
    (Expired, 504, "expired", "The deadline passed before the job ran. Expected a later deadline"),
    (ForwardTimeout, 504, "forward-timeout", "The forward exceeded its limit. Expected a smaller request"),
    (ResultTimeout, 504, "result-timeout", ""),
    (Cancelled, 409, "cancelled", "The job was cancelled before it ran. Expected a new request"),
    (NonFiniteOutput, 502, "non-finite-output", "The model's outputs have NaN or infinity. Expected other inputs"),
    (JobFailed, 502, "model-error", _OF_MODEL),
    (PenstockError, 502, "unreadable-result", "The result cannot be verified. Expected a result of a trusted worker"),
)
_NOT_FOUND: Final = {"unknown-model": "model not found or not loaded", "unknown-job": "job not found"}


def problem_of(error: Exception) -> Problem:
    """The problem of an error. One that is in no row is a mistake of the gateway: 500, without a text of its own."""
    if isinstance(error, RequestRefused):
        title = _TITLES[error.status]
        return Problem(error.status, title.replace(" ", "-"), title, str(error), error.headers)
    for kind, status, code, text in _BY_KIND:
        if isinstance(error, kind):
            title = _NOT_FOUND.get(code, _TITLES[status])
            return Problem(status, code, title, text or str(error), _headers(error, status))
    return Problem(500, "internal-error", _TITLES[500], "The gateway failed. Its operators find the reason in its log")


def as_problem_json(problem: Problem) -> bytes:
    """The body of our own routes. `type` is a relative URI of the documentation."""
    return msgspec.json.encode(
        {
            "type": f"urn:penstock:problem:{problem.code}",
            "title": problem.title,
            "status": problem.status,
            "detail": problem.detail,
        }
    )


def _headers(error: Exception, status: int) -> tuple[tuple[bytes, bytes], ...]:
    if status == 401:
        return ((b"www-authenticate", b'Bearer realm="penstock"'),)
    if isinstance(error, RateLimited):
        return (_retry_after(error.retry_after_s), *headers_of(error.readings))
    if status != 503:
        return ()
    return (_retry_after(min(error.retry_after_s, _LONGEST_RETRY_S) if isinstance(error, QueueFull) else _RETRY_S),)


def _retry_after(seconds: float) -> tuple[bytes, bytes]:
    return b"retry-after", b"%d" % max(1, math.ceil(seconds))
