"""The key under which equal jobs share one answer."""

from __future__ import annotations

import hashlib

import msgspec

from penstock.registry.envelope import JobHeader

__all__ = ["key_of"]


def key_of(header: JobHeader, sealed: bytes, label: str, *, tenant: str) -> bytes:
    """The key of an answer, 16 bytes: equal for jobs with equal inputs and options for the version with this label.

    sealed: the envelope of the job with this header; the key covers its body and not its signature. tenant: the owner
    of the answer; empty if all tenants share it.
    """
    asked = (tenant, header.model, label, header.content, header.options.outputs)
    digest = hashlib.blake2b(msgspec.msgpack.encode(asked), digest_size=16)
    end = len(sealed) - (32 if header.key else 0)
    digest.update(memoryview(sealed)[8 + int.from_bytes(sealed[4:8], "little") : end])
    return digest.digest()
