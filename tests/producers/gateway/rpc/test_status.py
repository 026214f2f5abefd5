"""Every problem of the gateway has a status of gRPC, and those that end by themselves say when to come back."""

from __future__ import annotations

import grpc
import pytest

from penstock.producers.gateway import problems
from penstock.producers.gateway.exchange import RequestRefused
from penstock.producers.gateway.rpc.status import status_of
from penstock.registry.errors import BrokerUnavailable, IdempotencyConflict, InvalidInput, NonFiniteOutput, QueueFull

UNCLEAR = {grpc.StatusCode.UNKNOWN, grpc.StatusCode.OK, grpc.StatusCode.CANCELLED}


@pytest.mark.parametrize("status", sorted(set(problems._TITLES) - {405, 415}))
def test_every_status_of_http_has_a_code(status: int):
    """Besides 405 and 415, which are about a method and a content type of HTTP."""
    status_found = status_of(RequestRefused(status, "Expected something"))
    assert status_found.code not in UNCLEAR
    assert status_found.details.endswith(": Expected something")
    assert status_found.is_mistake == (status == 500)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidInput("Expected x"), "INVALID_ARGUMENT"),
        (IdempotencyConflict("Expected another key"), "ALREADY_EXISTS"),
        (QueueFull("Expected a retry", 2.5), "RESOURCE_EXHAUSTED"),
        (BrokerUnavailable("away"), "UNAVAILABLE"),
        (NonFiniteOutput("y has NaN"), "OUT_OF_RANGE"),
        (RuntimeError("a mistake"), "INTERNAL"),
    ],
)
def test_errors_have_the_codes_that_clients_expect(error: Exception, code: str):
    """With the text of HTTP; the text of a mistake stays here."""
    found = status_of(error)
    assert found.code.name == code
    assert "a mistake" not in found.details


def test_a_passing_problem_says_when_to_come_back():
    """Whole seconds, and the milliseconds that clients with a retry policy obey."""
    trailing = dict(status_of(QueueFull("Expected a retry", 2.5)).trailing)
    assert trailing == {"penstock-problem": "queue-full", "retry-after": "3", "grpc-retry-pushback-ms": "3000"}
    assert dict(status_of(InvalidInput("Expected x")).trailing) == {"penstock-problem": "invalid-input"}
