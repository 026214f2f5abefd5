"""A form with one file (multipart/form-data, RFC 7578) in parts as they come. No file is held in memory.

    --boundary CRLF headers CRLF CRLF content CRLF --boundary ... --boundary--

The content of a part with a file name goes to `on_file` while it comes; the others are short texts.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from typing import Final

from penstock.producers.gateway.exchange import RequestRefused
from penstock.registry.errors import InvalidInput

__all__ = ["boundary_of", "read_form"]

_MOST_HEAD: Final = 8 * 1024
_MOST_TEXT: Final = 8 * 1024
_MOST_PARTS: Final = 32
_BOUNDARY: Final = re.compile(r';\s*boundary=(?:"([^"\r\n]{1,70})"|([^\s";,]{1,70}))', re.IGNORECASE)
_DISPOSITION: Final = re.compile(r"^content-disposition:\s*form-data\s*(;.*)$", re.IGNORECASE | re.MULTILINE)
_PARAMETER: Final = re.compile(r';\s*(name|filename)=(?:"([^"\r\n]*)"|([^\s";,]+))', re.IGNORECASE)
"""A value is a string in quotes or a token; see RFC 7578 4.2 and RFC 2183 2."""
_EXPECTED: Final = "Expected multipart/form-data with purpose and one file"


def boundary_of(content_type: str) -> bytes:
    """The boundary of a form. Raises RequestRefused for another content type, and InvalidInput without a boundary."""
    if content_type.partition(";")[0].strip().lower() != "multipart/form-data":
        raise RequestRefused(415, f"The body is no form. {_EXPECTED}")
    found = _BOUNDARY.search(content_type)
    if found is None:
        raise InvalidInput(f"The form has no boundary. {_EXPECTED}")
    return (found[1] or found[2]).encode("latin-1", "replace")


async def read_form(
    parts: AsyncIterator[bytes], boundary: bytes, on_file: Callable[[bytes], object]
) -> tuple[dict[str, str], str]:
    """(texts by name, name of the file). on_file: gets the content of the part `file`. Raises InvalidInput."""
    form = _Form(parts, b"\r\n--" + boundary)
    texts: dict[str, str] = {}
    filename: str | None = None
    await form.skip_preamble()
    for _ in range(_MOST_PARTS):
        if (head := await form.next_head()) is None:
            break
        name, found = _names(head)
        if found is not None:
            if name != "file" or filename is not None:
                raise InvalidInput(f"A file in {name!r:.40}, or a second one. {_EXPECTED}")
            filename = found
            await form.content(on_file)
        else:
            texts[name] = await form.text()
    else:
        raise InvalidInput(f"Over {_MOST_PARTS} fields. {_EXPECTED}")
    await form.drain()
    if filename is None:
        raise InvalidInput(f"There is no file. {_EXPECTED}")
    return texts, filename


class _Form:
    """The bytes that have come and are not used yet."""

    def __init__(self, parts: AsyncIterator[bytes], delimiter: bytes) -> None:
        self._parts = parts
        self._delimiter = delimiter
        # The first delimiter stands at the beginning, without a line before it.
        self._buffer = b"\r\n"

    async def skip_preamble(self) -> None:
        await self.content(lambda _: None)

    async def next_head(self) -> str | None:
        """The headers of the next part; None: the form has ended."""
        await self._fill(2)
        if self._buffer[:2] == b"--":
            return None
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _MOST_HEAD:
                raise InvalidInput(f"The head of a field is too long. {_EXPECTED}")
            await self._fill(len(self._buffer) + 1)
        head, self._buffer = self._buffer[:end], self._buffer[end + 4 :]
        return head.decode("utf-8", "replace").replace("\r\n", "\n")

    async def content(self, sink: Callable[[bytes], object]) -> None:
        """Everything before the next delimiter."""
        keep = len(self._delimiter) - 1
        while (end := self._buffer.find(self._delimiter)) < 0:
            if len(self._buffer) > keep:
                sink(self._buffer[:-keep])
                self._buffer = self._buffer[-keep:]
            await self._fill(len(self._buffer) + 1)
        if end:
            sink(self._buffer[:end])
        self._buffer = self._buffer[end + len(self._delimiter) :]

    async def text(self) -> str:
        found: list[bytes] = []

        def add(part: bytes) -> None:
            found.append(part)
            if sum(map(len, found)) > _MOST_TEXT:
                raise InvalidInput(f"A field is too long. Expected at most {_MOST_TEXT} bytes")

        await self.content(add)
        return b"".join(found).decode("utf-8", "replace")

    async def drain(self) -> None:
        """Reads what follows the form."""
        async for _ in self._parts:
            pass

    async def _fill(self, size: int) -> None:
        while len(self._buffer) < size:
            try:
                self._buffer += await anext(self._parts)
            except StopAsyncIteration:
                raise InvalidInput(f"The form ends too early. {_EXPECTED}") from None


def _names(head: str) -> tuple[str, str | None]:
    """(name, name of the file) of a part."""
    found = _DISPOSITION.search(head)
    values = _PARAMETER.findall(found[1]) if found else ()
    parameters = {key.lower(): quoted or token for key, quoted, token in values}
    if "name" not in parameters:
        raise InvalidInput(f"A field without a name. {_EXPECTED}")
    return parameters["name"], parameters.get("filename")
