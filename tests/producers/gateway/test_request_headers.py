"""What headers say of an answer: Prefer as RFC 7240 has it, and Accept with qualities."""

from __future__ import annotations

import pytest

from penstock.producers.gateway.exchange import JSON, Exchange, Limits, Message, RequestRefused
from penstock.producers.gateway.request_headers import preferred_wait_s, wanted_type
from penstock.producers.gateway.tensors import BINARY, MSGPACK


def exchange_with(name: bytes, *lines: str, content_type: bytes = b"") -> Exchange:
    """A request with these lines of one header."""

    async def receive() -> Message:
        raise AssertionError("nothing is read")

    async def send(_: Message) -> None:
        raise AssertionError("no answer is sent")

    headers = [(name, line.encode("latin-1")) for line in lines]
    scope = {"type": "http", "method": "POST", "path": "/", "headers": [*headers, (b"content-type", content_type)]}
    return Exchange(scope, receive, send, Limits(1000, 1.0))


@pytest.mark.parametrize(
    ("lines", "wait_s"),
    [
        (("wait=5",), 5),
        (('wait="5"',), 5),
        (("WAIT = 7",), 7),
        (("wait=5, ",), 5),
        ((", ,wait=0000000005",), 5),
        (("wait=99999999999",), 300),
        (('foo="a, b", wait=5',), 5),
        (('foo="\\"", wait=3',), 3),
        (("respond-async; x=1 ; y, wait=7",), 7),
        (("wait=1;;",), 1),
        (("wait=5", "respond-async"), 5),
        (("respond-async", "wait=5"), 5),
        (("wait=0, wait=5",), 0),
        (("wait=4", "wait=5"), 4),
        (("respond-async",), 0),
        ((",,",), 0),
        ((), 0),
    ],
)
def test_preferences_as_the_rfc_has_them(lines: tuple[str, ...], wait_s: int):
    """Quoted values, empty elements, several lines; the first `wait` counts (RFC 7240 2, RFC 9110 5.6.1)."""
    assert preferred_wait_s(exchange_with(b"prefer", *lines)) == wait_s


@pytest.mark.parametrize(
    "line",
    [
        *("wait", "wait=", "wait=-1", "wait=soon", "wait=1.5", "wait=5 6", "=5", 'foo="a', "wait=\xb2", "a b"),
        # Long enough to show a search that tries each space in several places.
        *("wait=5" + "; " * 20_000 + "\xff", "a" + " " * 60_000 + "\xff", "a," * 30_000 + "\xff"),
    ],
)
def test_a_preference_out_of_grammar_is_400(line: str):
    """A digit that is not of ASCII is no number of seconds."""
    with pytest.raises(RequestRefused, match=r"Bad Prefer\. Expected") as refused:
        preferred_wait_s(exchange_with(b"prefer", line))
    assert refused.value.status == 400


@pytest.mark.parametrize(
    ("lines", "body", "wanted"),
    [
        (("application/msgpack",), b"", MSGPACK),
        (("application/msgpack;q=0.1, application/json;q=0.9",), b"", JSON),
        (("application/json;q=0.1, application/msgpack; q=0.9",), b"", MSGPACK),
        (("application/json", "application/msgpack"), b"", JSON),
        (("text/html, application/octet-stream;q=0.5",), b"", BINARY),
        (("application/msgpack;q=0",), b"", JSON),
        (("application/msgpack;q=0",), MSGPACK, JSON),
        (("application/msgpack;q=0.0, */*",), MSGPACK, JSON),
        (("application/octet-stream;q=0",), MSGPACK, MSGPACK),
        (("text/html",), MSGPACK, MSGPACK),
        (("*/*",), MSGPACK, MSGPACK),
        ((), b"", JSON),
    ],
)
def test_the_type_that_the_client_prefers(lines: tuple[str, ...], body: bytes, wanted: bytes):
    """The highest quality, and among equal ones the first. One that is not here leaves the type of the body.

    A type with the quality 0 is refused, also where it is that of the body.
    """
    assert wanted_type(exchange_with(b"accept", *lines, content_type=body)) == wanted
