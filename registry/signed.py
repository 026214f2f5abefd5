"""A record and the signature of the operator who wrote it, as one value that any store can keep.

    payload -> seal_record -> `<key id>:<base64 of the signature>` LF payload -> open_record -> payload

The first line is empty while nobody signs. Keys are safety/keys.py's: here they are two functions, so that workers
need the public half only.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from typing import Final

from penstock.registry.errors import BadSignature

__all__ = ["Signer", "Verifier", "open_record", "seal_record"]

Signer = Callable[[bytes], tuple[str, bytes]]
"""Message -> (key id, signature)."""
Verifier = Callable[[bytes, str, bytes], bool]
"""(message, key id, signature) -> whether a known key of that id made it."""

_MAX_LINE_BYTES: Final = 256


def seal_record(payload: bytes, sign: Signer | None, context: str = "") -> bytes:
    """The payload behind its signature, or behind an empty line without a signer.

    context: what the record is about, such as `active minilm`. It is signed and not stored, so a record that was
    copied to another place does not verify there.
    """
    if sign is None:
        return b"\n" + payload
    key_id, signature = sign(_message(payload, context))
    return f"{key_id}:{base64.b64encode(signature).decode()}\n".encode() + payload


def open_record(data: bytes, verify: Verifier | None, context: str = "") -> bytes:
    """The payload that `seal_record` sealed for the same context.

    Without a verifier no signature is asked for, and one that is there is not looked at. Raises BadSignature.
    """
    end = data.find(b"\n", 0, _MAX_LINE_BYTES)
    if end < 0:
        raise BadSignature("not a record: it does not begin with the line of its signature")
    payload = data[end + 1 :]
    if verify is not None:
        _check(data[:end], _message(payload, context), verify)
    return payload


def _check(line: bytes, message: bytes, verify: Verifier) -> None:
    if not line:
        raise BadSignature("an unsigned record, and signatures are required here")
    key_id, _, encoded = line.partition(b":")
    try:
        signature = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        signature = b""
    # One text per signature: the last base64 digit has bits that decoding would ignore.
    if base64.b64encode(signature) != encoded:
        raise BadSignature("the signature of this record is not base64")
    if not verify(message, key_id.decode("ascii", "replace"), signature):
        raise BadSignature("the signature of this record does not hold, or its key is not known here")


def _message(payload: bytes, context: str) -> bytes:
    # What is signed begins with what it is for: a signature of another protocol under the same key fits nothing here.
    return f"penstock record v1\n{context.encode().hex()}\n".encode() + payload
