"""Errors of redis-py that need no server: which of them are final, and what is said of the others."""

from __future__ import annotations

import socket
import ssl

import pytest
import redis

from penstock.registry.broker.broker_url import parse_broker_url
from penstock.registry.broker.redis_connection import RedisConnection, check_broker
from penstock.registry.broker.redis_refusals import final, refusal, unanswered
from penstock.registry.errors import BrokerRefused, BrokerUnavailable
from tests.servers import free_port

ADDRESS = parse_broker_url("redis://:hunter2@host:7000/3")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (redis.AuthenticationError("invalid username-password pair"), "refuses the user or the password"),
        (redis.AuthenticationError("Authentication required."), "asks for a password"),
        (redis.ResponseError("NOAUTH Authentication required."), "asks for a password"),
        (redis.ResponseError("WRONGPASS invalid username-password pair"), "refuses the user or the password"),
    ],
)
def test_bad_credentials_are_final(error: redis.RedisError, text: str):
    """On connecting, and in the answer to a command after the server's users changed."""
    found = refusal(error, ADDRESS, ["PING"]) if isinstance(error, redis.ResponseError) else final(error, ADDRESS)
    assert isinstance(found, BrokerRefused)
    assert str(found).startswith("redis://host:7000/3 ")
    assert text in str(found)


def test_an_error_that_the_caller_handles_is_not_ours():
    """A client in an `except` block: Python links the caller's own TLS error to every error of the call."""
    broker = RedisConnection.from_url(f"redis://127.0.0.1:{free_port()}/0", timeout_s=0.01)

    def ping_while_handling() -> None:
        try:
            raise ssl.SSLError(1, "of another library")
        except ssl.SSLError:
            broker.ping()

    with pytest.raises(BrokerUnavailable, match=r"nothing listens at redis://127\.0\.0\.1:") as away:
        ping_while_handling()
    assert not isinstance(away.value, BrokerRefused)


@pytest.mark.parametrize(
    ("cause", "reason"),
    [
        (ConnectionRefusedError(111, "refused"), "nothing listens at redis://host:7000/3"),
        (socket.gaierror(-2, "unknown"), "the host name of redis://host:7000/3 is not known"),
        (TimeoutError("timed out"), "redis://host:7000/3 timed out"),
        (ConnectionResetError(104, "reset"), "the connection to redis://host:7000/3 was lost"),
        (redis.InvalidResponse("H"), "the server at redis://host:7000/3 does not speak the Redis protocol"),
    ],
)
def test_an_outage_names_the_address_and_the_reason(cause: Exception, reason: str):
    """And neither user nor password."""
    error = redis.ConnectionError("redis-py says")
    error.__cause__ = cause
    assert str(unanswered(error, ADDRESS, 5)) == f"The broker did not answer within 5 s: {reason}"
    assert final(error, ADDRESS) is None


def test_the_check_of_a_broker_that_is_away_ends_in_time():
    """`penstock worker` asks once before it starts workers, which wait for their broker."""
    with pytest.raises(BrokerUnavailable) as away:
        check_broker(f"redis://127.0.0.1:{free_port()}/0", 0.01)
    assert not isinstance(away.value, BrokerRefused)


@pytest.mark.parametrize(
    ("cause", "text"),
    [
        (ssl.SSLEOFError(8, "EOF occurred in violation of protocol"), None),
        (ssl.SSLZeroReturnError(6, "TLS/SSL connection has been closed"), None),
        (ssl.SSLError(1, "[SSL: TLSV1_ALERT_INTERNAL_ERROR]"), None),
        (ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER]"), "this port does not speak TLS. Expected redis://"),
        (ssl.SSLError(1, "[SSL: RECORD_LAYER_FAILURE]"), "this port does not speak TLS. Expected redis://"),
        (
            ssl.SSLError(1, "[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED]"),
            "the server ended the TLS handshake (tlsv13 alert certificate required). Expected a client certificate",
        ),
    ],
)
def test_an_end_of_a_tls_connection_may_pass(cause: ssl.SSLError, text: str | None):
    """A server that restarts ends connections: only what it would do again is final."""
    cause.reason = cause.args[1].removeprefix("[SSL: ").removesuffix("]")
    error = redis.ConnectionError("redis-py says")
    error.__cause__ = cause
    found = final(error, parse_broker_url("rediss://host:7000/3"))
    if text is None:
        assert found is None
    else:
        assert isinstance(found, BrokerRefused)
        assert str(found).startswith(f"rediss://host:7000/3: {text}")
