"""A form with one file, wherever its parts end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producers.gateway.exchange import RequestRefused
from penstock.producers.gateway.multipart import boundary_of, read_form
from penstock.registry.errors import InvalidInput


def form(content: bytes, purpose: bytes = b"batch", end: bytes = b"--b--\r\n") -> bytes:
    """A form as clients send it."""
    return (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n' + purpose + b"\r\n"
        b'--b\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n'
        b"Content-Type: application/octet-stream\r\n\r\n" + content + b"\r\n" + end
    )


def read(body: bytes, cuts: Sequence[int] = ()) -> tuple[dict[str, str], str, bytes]:
    """(texts, name, content) of a body that comes in parts."""
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    found: list[bytes] = []

    async def parts() -> AsyncIterator[bytes]:
        for start, stop in pairwise(edges):
            yield body[start:stop]

    texts, name = asyncio.run(read_form(parts(), b"b", found.append))
    return texts, name, b"".join(found)


def test_parameters_may_be_tokens():
    """Without quotes, with other letters, beside a name in another encoding (RFC 7578 4.2, RFC 2183 2)."""
    head = b"--b\r\nContent-Disposition: form-data; "
    body = (
        head
        + b"name=purpose\r\n\r\nbatch\r\n"
        + head
        + b"Name=file; filename=l.jsonl; filename*=utf-8''l.jsonl\r\n\r\nx\r\n--b--\r\n"
    )
    assert read(body) == ({"purpose": "batch"}, "l.jsonl", b"x")
    assert boundary_of("multipart/form-data; Boundary=b-1") == b"b-1"


@given(st.lists(st.sampled_from([b"\r\n", b"--b", b"-", b"\r", b"x", b"\r\n--"])), st.lists(st.integers(0, 400)))
def test_content_comes_back(pieces: list[bytes], cuts: list[int]):
    """Byte for byte, also where it looks like a boundary."""
    content = b"".join(pieces)
    if b"\r\n--b" in b"\r\n" + content + b"\r\n":
        content = content.replace(b"--b", b"")
    if b"\r\n--b" in b"\r\n" + content:
        return
    assert read(form(content), cuts) == ({"purpose": "batch"}, "a.jsonl", content)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"nothing",
        form(b"x", end=b""),
        form(b"x")[:60],
        b"--b--",
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--',
        b"--b\r\n" + b"h" * 10_000,
        b"--b\r\n\r\n\r\n--b--",
        form(b"x", purpose=b"p" * 10_000),
        form(b"x", end=form(b"y")),
        b'--b\r\nContent-Disposition: form-data; name="x"\r\n\r\n\r\n' * 40 + b"--b--",
    ],
)
def test_broken_forms_are_refused(body: bytes):
    """With one line that says what was expected."""
    with pytest.raises(InvalidInput, match="Expected"):
        read(body)


def test_boundary():
    """Bare and in quotes; a form without one is refused, and another type with 415."""
    assert boundary_of("multipart/form-data; boundary=abc") == b"abc"
    assert boundary_of('multipart/form-data; charset=utf-8; boundary="a b"') == b"a b"
    for other in ("multipart/form-data", 'multipart/form-data; boundary=""'):
        with pytest.raises(InvalidInput, match="Expected"):
            boundary_of(other)
    for other in ("application/json", "multipart/form-database; boundary=abc", ""):
        with pytest.raises(RequestRefused, match="Expected multipart/form-data") as refused:
            boundary_of(other)
        assert refused.value.status == 415
