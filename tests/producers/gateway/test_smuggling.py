"""Request smuggling: what a proxy in front may read as one request is never two here, and the other way around.

Each case is raw bytes on a socket, with a second request behind it that must not be answered as one of its own.
"""

from __future__ import annotations

import re
import socket

import httpx
import pytest

from tests.producers.gateway.conftest import GatewayStack

HIDDEN = b"GET /v1/models/double HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
BODY = b'{"inputs": {"x": [[1, 2, 3, 4]]}}'
HEAD = b"POST /v1/models/double:predict HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
CHUNKED = b"%x\r\n%s\r\n" % (len(BODY), BODY)
LENGTH = b"Content-Length: %d\r\n" % len(BODY)

REFUSED = {
    "both lengths": HEAD + LENGTH + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED + b"0\r\n\r\n" + HIDDEN,
    "both lengths, chunked first": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\n0\r\n\r\n" + HIDDEN,
    "two lengths": HEAD + LENGTH + b"Content-Length: 0\r\n\r\n" + BODY + HIDDEN,
    "two equal lengths": HEAD + LENGTH + LENGTH + b"\r\n" + BODY + HIDDEN,
    "a list of lengths": HEAD + b"Content-Length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY + HIDDEN,
    "a signed length": HEAD + b"Content-Length: +%d\r\n\r\n" % len(BODY) + BODY + HIDDEN,
    "a negative length": HEAD + b"Content-Length: -1\r\n\r\n" + BODY + HIDDEN,
    "a length in hexadecimal": HEAD + b"Content-Length: 0x21\r\n\r\n" + BODY + HIDDEN,
    "a huge length": HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n" + BODY + HIDDEN,
    "a space before the colon": HEAD + b"Content-Length : 4\r\n\r\n" + BODY + HIDDEN,
    "obs-fold": HEAD + b"X-Fold: a\r\n Transfer-Encoding: chunked\r\n" + LENGTH + b"\r\n" + BODY,
    "an unknown coding": HEAD + b"Transfer-Encoding: xchunked\r\n\r\n" + CHUNKED + b"0\r\n\r\n" + HIDDEN,
    "chunked is not last": HEAD + b"Transfer-Encoding: chunked, identity\r\n\r\n" + CHUNKED + b"0\r\n\r\n" + HIDDEN,
    "a chunk size with a sign": HEAD + b"Transfer-Encoding: chunked\r\n\r\n+21\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN,
    "a chunk size with 0x": HEAD + b"Transfer-Encoding: chunked\r\n\r\n0x21\r\n" + BODY + b"\r\n0\r\n\r\n" + HIDDEN,
    "a huge chunk size": HEAD + b"Transfer-Encoding: chunked\r\n\r\n%s\r\n" % (b"f" * 17) + BODY + b"\r\n" + HIDDEN,
    "a longer chunk than its size": HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n4\r\n"
    + BODY
    + b"\r\n0\r\n\r\n"
    + HIDDEN,
    "NUL in a header": HEAD + b"X-Nul: a\x00b\r\n" + LENGTH + b"\r\n" + BODY + HIDDEN,
    "bare CR in a header": HEAD + b"X-Cr: a\rContent-Length: 0\r\n" + LENGTH + b"\r\n" + BODY + HIDDEN,
    "bare LF in front of chunks": HEAD + b"Transfer-Encoding: chunked\r\n\r\n21\n" + BODY + b"\n0\n\n" + HIDDEN,
}


def answers(stack: GatewayStack, raw: bytes) -> list[int]:
    """The statuses of all answers on one connection, until the gateway closes it."""
    url = httpx.URL(stack.gateway.url)
    with socket.create_connection((url.host, url.port or 80), 60) as client:
        client.sendall(raw)
        found = b""
        try:
            while part := client.recv(65536):
                found += part
        except ConnectionResetError:
            pass
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", found)]


@pytest.mark.parametrize("name", REFUSED)
def test_ambiguous_requests_are_refused_and_hide_none(stack: GatewayStack, name: str):
    """One answer, a refusal, and the connection is closed: the bytes behind it are no request."""
    (status,) = answers(stack, REFUSED[name])
    assert 400 <= status < 500


def test_whole_requests_are_answered_in_their_order(stack: GatewayStack):
    """Two requests on one connection, the first with a length or with chunks."""
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED + b"0\r\n\r\n"
    assert answers(stack, chunked + HIDDEN) == [200, 200]
    assert answers(stack, HEAD + LENGTH + b"\r\n" + BODY + HIDDEN.replace(b"double", b"nothing")) == [200, 404]


def test_trailers_are_no_headers(stack: GatewayStack):
    """A field behind the last chunk changes nothing: a proxy that sets or removes headers does not look there."""
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + CHUNKED
    for trailer in (b"Content-Type: text/html", b"Idempotency-Key: two words", b"Prefer: ,,", b"X-Any: y"):
        assert answers(stack, chunked + b"0\r\n" + trailer + b"\r\n\r\n" + HIDDEN) == [200, 200], trailer
    assert answers(stack, chunked + b"0\r\nContent-Length: 5\r\n\r\n" + HIDDEN) == [400]


def test_a_websocket_handshake_hides_no_request(stack: GatewayStack):
    """Bytes behind an upgrade are frames; without a valid key it is refused, and what follows is not answered."""
    head = b"GET /predict/stream HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    refused = answers(stack, head + b"Sec-WebSocket-Version: 777\r\n\r\n" + HIDDEN)
    assert len(refused) == 1
    assert 400 <= refused[0] < 500
