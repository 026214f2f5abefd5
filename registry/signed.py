"""A record and its operator's signature, as one value that any store can keep.

    payload -> seal_record -> `<key id>:<base64 of the signature>` LF payload -> open_record -> payload

The first line is empty for an unsigned record. The keys are in safety/operator_key.py; here they are two functions, so
that workers need the public half only.
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
"""(message, key id, signature) -> whether the known key with this id made the signature."""

_MAX_LINE_BYTES: Final = 256


def seal_record(payload: bytes, sign: Signer | None, context: str = "") -> bytes:
    """The payload after a line with its signature, or after an empty line without a signer.

    context: the subject of the record, such as `active minilm`. It is signed but not stored, so that a record that
    was copied to another place does not verify there.
    """
    if sign is None:
        return b"\n" + payload
    key_id, signature = sign(_message(payload, context))
    return f"{key_id}:{base64.b64encode(signature).decode()}\n".encode() + payload


def open_record(data: bytes, verify: Verifier | None, context: str = "") -> bytes:
    """The payload of `seal_record` with the same context.

    Without a verifier the signature is ignored. Raises BadSignature.
    """
    end = data.find(b"\n", 0, _MAX_LINE_BYTES)
    if end < 0:
        raise BadSignature("not a record: the line of its signature is missing")
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
    # A signature has one text: decoding would ignore some bits of the last base64 digit.
    if base64.b64encode(signature) != encoded:
        raise BadSignature("the signature of this record is not base64")
    if not verify(message, key_id.decode("ascii", "replace"), signature):
        raise BadSignature("the signature of this record is wrong, or its key is not known here")


def _message(payload: bytes, context: str) -> bytes:
    # The signed message begins with its protocol, so that signatures of other protocols with the same key are refused.
    return f"penstock record v1\n{context.encode().hex()}\n".encode() + payload
