"""Results whose headers equal that of an earlier result, but for id and times: verified, and not decoded.

    first result -> envelope.open_result -> learn: the bytes of its header without id and times
    later ones   -> the same bytes, the id that was asked for, a good MAC -> outputs

The MAC of every result is verified, over all of its bytes, and a sealed body is opened. A result that is not surely
good gets None, and its caller goes the plain way, which decodes and checks everything and raises the errors.
"""

from __future__ import annotations

from hmac import compare_digest
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.registry.envelope import FIXED_BYTES, MAC_BYTES, Keyring, ResultHeader, encode_header
from penstock.registry.errors import PenstockError
from penstock.registry.tensors import DTYPES, STRING, Array

__all__ = ["MOST_HEADERS", "MOST_HEADER_BYTES", "MOST_LAYOUTS", "ResultMatcher"]

MOST_LAYOUTS: Final = 16
"""Sizes of headers that a matcher knows. One more makes it forget the others."""
MOST_HEADERS: Final = 64
"""Headers of one size that it knows. One more makes it forget the others of this size."""
MOST_HEADER_BYTES: Final = 1024
"""It knows no longer headers, so that it takes about 1 MiB at most."""
_MOST_BYTES: Final = 64 * 1024
"""Larger results go the plain way: their bytes cost more than the header."""
_TIMES: Final = 27
"""The bytes of three floats, each behind a byte that says so."""
_TIMES_KEY: Final = b"\xa7timings\x93"
"""What comes before them in msgpack: the name of the field, and an array of three. No UTF-8 text contains it."""


class _Known(NamedTuple):
    """A header, but for id and times: its tenant, its version, its signing key, and the only output."""

    tenant: str
    version: str
    key: str
    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    nbytes: int
    """Of the body as it travels."""
    is_sealed: bool


class _Layout:
    """Where id and times are in headers of one size, and these headers by their other bytes."""

    __slots__ = ("begin", "end", "headers", "times")

    def __init__(self, begin: int, end: int, times: int) -> None:
        self.begin = begin
        self.end = end
        self.times = times
        self.headers: dict[bytes, _Known] = {}

    def rest(self, sealed: bytes, stop: int) -> bytes:
        """The frame and the header without id and times."""
        return sealed[: self.begin] + sealed[self.end : self.times] + sealed[self.times + _TIMES : stop]


class ResultMatcher:
    """The headers of earlier results, for results of one output of numbers. Thread-safe."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._layouts: dict[int, _Layout] = {}
        """By the end of the header."""

    def answer(self, job_id: str, tenant: str, sealed: bytes) -> tuple[dict[str, Array], str] | None:
        """The outputs of a job of this tenant, and the version that answered.

        None: the header is not known, or something may be wrong.
        """
        stop = FIXED_BYTES + int.from_bytes(sealed[4:FIXED_BYTES], "little")
        layout = self._layouts.get(stop)
        if layout is None or len(sealed) > _MOST_BYTES:
            return None
        begin, end, times = layout.begin, layout.end, layout.times
        # As _Layout.rest, without its call.
        known = layout.headers.get(sealed[:begin] + sealed[end:times] + sealed[times + _TIMES : stop])
        # Each of the three times must be a float of 64 bits, as in the known header.
        if known is None or sealed[begin:end] != job_id.encode() or sealed[times : times + _TIMES : 9] != b"\xcb" * 3:
            return None
        body_end = stop + known.nbytes
        if not known.key:
            is_genuine = not self._keyring.signs and len(sealed) == body_end
        else:
            mac = self._keyring.result_macs.get(known.key)
            is_genuine = mac is not None and compare_digest(mac.digest(sealed[:body_end]), sealed[body_end:])
        if not is_genuine or known.tenant != tenant:
            return None
        if not known.is_sealed:
            return {known.name: np.ndarray(known.shape, known.dtype, sealed, stop)}, known.version
        body_keys = self._keyring.body_keys
        if body_keys is None:
            return None
        try:
            plain = body_keys.open(memoryview(sealed)[stop:body_end], sealed[:stop])
        except PenstockError:
            return None
        return {known.name: np.ndarray(known.shape, known.dtype, plain)}, known.version

    def learn(self, header: ResultHeader, sealed: bytes) -> None:
        """Takes a result that was opened the plain way, with good outputs: later ones are compared with its header."""
        stop = FIXED_BYTES + int.from_bytes(sealed[4:FIXED_BYTES], "little")
        nbytes = len(sealed) - stop - (MAC_BYTES if header.key else 0)
        # No other job has its trace, and so its header.
        if len(header.content) != 1 or stop > MOST_HEADER_BYTES or nbytes == 0 or header.context.traceparent:
            return
        (tensor,) = header.content
        # Only what our own encoder writes: the places below are right for no other bytes.
        if tensor.dtype == STRING or encode_header(header) != sealed[FIXED_BYTES:stop]:
            return
        job_id = header.id.encode()
        begin = sealed.index(job_id, FIXED_BYTES)
        end = begin + len(job_id)
        times = sealed.find(_TIMES_KEY, end, stop) + len(_TIMES_KEY)
        if times < end:
            return
        layout = self._layouts.get(stop)
        if layout is None or (layout.begin, layout.end, layout.times) != (begin, end, times):
            if len(self._layouts) >= MOST_LAYOUTS:
                self._layouts.clear()
            layout = self._layouts[stop] = _Layout(begin, end, times)
        if len(layout.headers) >= MOST_HEADERS:
            layout.headers.clear()
        known = _Known(
            header.context.tenant,
            header.version,
            header.key,
            tensor.name,
            DTYPES[tensor.dtype],
            tensor.shape,
            nbytes,
            header.is_sealed,
        )
        layout.headers[layout.rest(sealed, stop)] = known
