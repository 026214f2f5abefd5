"""Ended lines of a batch -> its output file and its error file. What they hold, a restart does not run again.

    {"id": "batch_req_<batch>_<line>", "custom_id", "response": {"status_code", "request_id", "body"}, "error"}

A line has an answer, an answer that is an error (with its status, in the error file), or no answer: then `error` says
why. The file of a killed process ends with whole blocks, and each block has whole lines: one of any length, or several
of up to BLOCK_BYTES together. A line that is too long for a block is in the error file, without its answer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Final, NamedTuple, Self

import msgspec

from penstock.producers.gateway.batches.block_file import BLOCK_BYTES, MOST_PLAIN_BYTES, BlockWriter
from penstock.producers.gateway.batches.file_store import FileStore
from penstock.producers.gateway.batches.records import Counts, StoredBatch
from penstock.registry.errors import PenstockError

__all__ = ["EndedLine", "Journal"]

_FIRST_ERROR: Final = 400
_MOST_BODY_BYTES: Final = MOST_PLAIN_BYTES - 64 * 1024
"""Its line has a custom_id and ids, too."""


class EndedLine(NamedTuple):
    """How a line ended. body: the JSON of its answer, an error's too; None: there is none, and `code` says why."""

    number: int
    custom_id: str | None
    status: int
    job_id: str
    body: bytes | None
    code: str = ""
    message: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether it belongs into the error file."""
        return self.body is None or self.status >= _FIRST_ERROR


class _Response(msgspec.Struct):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Error(msgspec.Struct):
    code: str
    message: str


class _Written(msgspec.Struct):
    id: str
    custom_id: str | None
    response: _Response | None
    error: _Error | None


class _Known(msgspec.Struct):
    id: str


_encode: Final = msgspec.json.Encoder().encode
_decode: Final = msgspec.json.Decoder(_Known).decode


class Journal:
    """The two files of a batch that runs. One process has them at a time: raises FileBusy for the others.

    done: the numbers of the lines that have ended.
    """

    def __init__(self, store: FileStore, stored: StoredBatch) -> None:
        self._prefix = f"batch_req_{stored.batch.id.removeprefix('batch_')}_"
        self.done: set[int] = set()
        self._completed = self._failed = 0
        with ExitStack() as opened:
            # Whoever has the first lock goes on with the second file.
            self._output = store.journal(stored.output)
            opened.callback(self._output.close)
            self._errors = store.journal(stored.errors)
            opened.callback(self._errors.close)
            self._completed = self._recover(self._output)
            self._failed = self._recover(self._errors)
            opened.pop_all()

    def counts(self, total: int) -> Counts:
        """The progress."""
        return Counts(total, self._completed, self._failed)

    @property
    def sizes(self) -> tuple[int, int]:
        """Bytes of the output file and of the error file."""
        return self._output.nbytes, self._errors.nbytes

    def write(self, lines: Sequence[EndedLine]) -> None:
        """Writes lines that have ended. They survive the process."""
        lines = [_shortened(line) for line in lines]
        answered = [line for line in lines if not line.has_failed]
        failed = [line for line in lines if line.has_failed]
        for block in _blocks(map(self._written, answered)):
            self._output.append(block)
        for block in _blocks(map(self._written, failed)):
            self._errors.append(block)
        self._completed += len(answered)
        self._failed += len(failed)
        self.done.update(line.number for line in lines)

    def sync(self) -> None:
        """Waits until the disk has both files."""
        self._output.sync()
        self._errors.sync()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Closes the files, which another process may open then."""
        self._output.close()
        self._errors.close()

    def _recover(self, writer: BlockWriter) -> int:
        before = len(self.done)
        for block in writer.recover():
            for text in block.splitlines():
                self.done.add(self._number(text))
        return len(self.done) - before

    def _number(self, text: bytes) -> int:
        try:
            return int(_decode(text).id.removeprefix(self._prefix))
        except (msgspec.MsgspecError, ValueError):
            raise PenstockError("A file of a batch was changed on the disk. Expected the lines of this batch") from None

    def _written(self, line: EndedLine) -> bytes:
        answer = None if line.body is None else _Response(line.status, line.job_id, msgspec.Raw(line.body))
        error = _Error(line.code, line.message) if line.code else None
        return _encode(_Written(f"{self._prefix}{line.number}", line.custom_id, answer, error)) + b"\n"


def _shortened(line: EndedLine) -> EndedLine:
    """The line, or one that says why its answer cannot be kept."""
    if line.body is None or len(line.body) <= _MOST_BODY_BYTES:
        return line
    message = f"The answer has {len(line.body)} bytes. Expected at most {_MOST_BODY_BYTES}: send fewer inputs in a line"
    return line._replace(body=None, code="answer_too_long", message=message)


def _blocks(texts: Iterator[bytes]) -> Iterator[bytes]:
    """Texts one behind the other. A block has one of them, or several of up to BLOCK_BYTES together."""
    block: list[bytes] = []
    nbytes = 0
    for text in texts:
        if block and nbytes + len(text) > BLOCK_BYTES:
            yield b"".join(block)
            block, nbytes = [], 0
        block.append(text)
        nbytes += len(text)
    if block:
        yield b"".join(block)
