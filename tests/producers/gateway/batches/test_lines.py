"""Lines of a file, wherever its blocks end."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.producers.gateway.batches.lines import Line, check, custom_id_of, open_line, read_lines
from penstock.registry.errors import InvalidInput

GOOD = b'{"custom_id": "a", "method": "POST", "url": "/u", "body": {"k": [1, 2]}}'


@given(st.lists(st.sampled_from([b"", b" ", b"ab", b"c" * 40, b"\r"])), st.lists(st.integers(0, 200)))
def test_lines_do_not_depend_on_blocks(texts: list[bytes], cuts: list[int]):
    """Each line that is not empty, with its number; one of over 32 bytes without its text."""
    content = b"\n".join(texts)
    edges = [0, *sorted(min(cut, len(content)) for cut in cuts), len(content)]
    blocks = [content[start:stop] for start, stop in pairwise(edges)]
    expected = [Line(number, text if len(text) <= 32 else None) for number, text in enumerate(texts, 1) if text.strip()]
    assert list(read_lines(blocks, 32)) == expected


def test_a_line_is_a_request():
    """Its body stays JSON."""
    request = open_line(Line(1, GOOD), "/u")
    assert (request.custom_id, bytes(request.body)) == ("a", b'{"k": [1, 2]}')


@pytest.mark.parametrize(
    "text",
    [
        b"[1]",
        b'{"custom_id": 1, "method": "POST", "url": "/u", "body": {}}',
        b'{"custom_id": "", "method": "POST", "url": "/u", "body": {}}',
        b'{"custom_id": "' + b"a" * 513 + b'", "method": "POST", "url": "/u", "body": {}}',
        GOOD.replace(b"POST", b"post"),
        GOOD.replace(b"/u", b"/v"),
        GOOD[:-1],
        b"\xff",
        b"[" * 100_000,
        None,
    ],
)
def test_broken_lines_say_what_was_expected(text: bytes | None):
    """Each by its own mistake."""
    with pytest.raises(InvalidInput, match="Expected"):
        open_line(Line(1, text), "/u")


@pytest.mark.parametrize(
    ("text", "custom_id"),
    [(GOOD, "a"), (GOOD[:-5], "a"), (b'{"custom_id": "\\u00e9" x', "\u00e9"), (b"nothing", None), (None, None)],
)
def test_custom_id_of_a_broken_line(text: bytes | None, custom_id: str | None):
    """The error file names it where it can be read."""
    assert custom_id_of(Line(1, text)) == custom_id


def test_lines_without_a_custom_id_are_no_duplicates():
    """Each of them fails by itself."""
    assert check([Line(1, b"x"), Line(2, b"x"), Line(4, GOOD)]) == (3, ())
