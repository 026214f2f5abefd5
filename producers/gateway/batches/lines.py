"""The bytes of a batch file -> numbered lines -> requests, and what is wrong with the file as a whole.

blocks --> read_lines --> Line --> open_line --> LineRequest, or InvalidInput: that line fails, the others run
                           '----> check --> (lines, errors): an error here fails the batch before a line runs
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

import msgspec

from penstock.producers.gateway.batches.records import BatchError
from penstock.registry.errors import InvalidInput

__all__ = ["MOST_LINES", "Line", "LineRequest", "check", "custom_id_of", "open_line", "read_lines"]

MOST_LINES: Final = 50_000
_MOST_ERRORS: Final = 100
_MOST_ID: Final = 512
_CUSTOM_ID: Final = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.){0,1024}")')


class Line(NamedTuple):
    """A line that is not empty. number: from 1, as editors count. text: None: it is longer than a request may be."""

    number: int
    text: bytes | None


class LineRequest(msgspec.Struct):
    """The request of a line. body: the JSON of the request's body."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Id(msgspec.Struct):
    custom_id: str


_decode: Final = msgspec.json.Decoder(LineRequest).decode
_decode_id: Final = msgspec.json.Decoder(_Id).decode


def read_lines(blocks: Iterable[bytes], most_bytes: int) -> Iterator[Line]:
    """The lines of a file. Holds one block and one line of at most `most_bytes`."""
    number, rest, is_too_long = 1, b"", False
    for block in blocks:
        first, *others = block.split(b"\n")
        rest += first
        for part in others:
            if is_too_long or len(rest) > most_bytes:
                yield Line(number, None)
            elif rest and not rest.isspace():
                yield Line(number, rest)
            number, rest, is_too_long = number + 1, part, False
        if len(rest) > most_bytes:
            # Its bytes need not be kept: the line fails.
            rest, is_too_long = b"x", True
    if is_too_long:
        yield Line(number, None)
    elif rest and not rest.isspace():
        yield Line(number, rest)


def open_line(line: Line, endpoint: str) -> LineRequest:
    """The request of a line. Raises InvalidInput, which says what was expected."""
    if line.text is None:
        raise InvalidInput("The line is too long. Expected at most the bytes of one request")
    try:
        request = _decode(line.text)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"The line is no request ({error!s:.120}). Expected a JSON object with custom_id, method, url and body"
        ) from None
    if not 0 < len(request.custom_id) <= _MOST_ID:
        raise InvalidInput(f"Bad custom_id. Expected 1 to {_MOST_ID} characters")
    if request.method != "POST":
        raise InvalidInput("Bad method. Expected POST")
    if request.url != endpoint:
        raise InvalidInput("Bad url. Expected the endpoint of the batch")
    return request


def custom_id_of(line: Line) -> str | None:
    """The custom_id of a line, also of one that is otherwise broken; None where it cannot be read."""
    if line.text is None:
        return None
    try:
        return _decode_id(line.text).custom_id
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        found = _CUSTOM_ID.search(line.text)
    try:
        return None if found is None else msgspec.json.decode(found[1], type=str)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def check(lines: Iterable[Line]) -> tuple[int, tuple[BatchError, ...]]:
    """(lines, errors of the file as a whole): no line, too many lines, a custom_id that is there twice."""
    seen: set[str] = set()
    errors: list[BatchError] = []
    count = 0
    for line in lines:
        count += 1
        if count > MOST_LINES:
            errors.append(
                BatchError("too_many_lines", f"Over {MOST_LINES} lines. Expected at most {MOST_LINES}", line.number)
            )
            break
        custom_id = custom_id_of(line)
        if custom_id is not None and custom_id in seen and len(errors) < _MOST_ERRORS:
            text = f"The custom_id of line {line.number} is there twice. Expected each custom_id once"
            errors.append(BatchError("duplicate_custom_id", text, line.number, "custom_id"))
        if custom_id is not None:
            seen.add(custom_id)
    if not count:
        errors.append(BatchError("empty_file", "The file has no lines. Expected at least one request"))
    return count, tuple(errors)
