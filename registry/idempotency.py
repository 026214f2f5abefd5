"""Idempotency keys as the broker knows them: the digest of a key, and the fingerprint of the request behind it. Pure.

(tenant, key) -> digest: finds the first job of the key
(version, shapes, values) -> fingerprint: the same key with other inputs is a conflict
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Final, TypeGuard

from penstock.registry.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.registry.tensors import Tensor

__all__ = ["KeyDigests", "checked_key", "fingerprint_state", "is_key"]

_LONGEST: Final = 255
_DIGEST_BYTES: Final = 16


def is_key(key: object) -> TypeGuard[str]:
    """Whether a value may be an idempotency key."""
    return type(key) is str and 0 < len(key) <= _LONGEST


def checked_key(key: object) -> str:
    """The key. Raises InvalidInput for a value that is none."""
    if not isinstance(key, str) or not 0 < len(key) <= _LONGEST:
        raise InvalidInput(f"Bad idempotency key. Expected a string of 1 to {_LONGEST} characters")
    return key


class KeyDigests:
    """The digests of one tenant's keys."""

    __slots__ = ("_tenant",)

    def __init__(self, tenant: str) -> None:
        # Names hold no NUL, so the pair is unambiguous.
        self._tenant = hashlib.blake2b(tenant.encode() + b"\0", digest_size=_DIGEST_BYTES)

    def of(self, key: str) -> str:
        """The digest of a key, as 32 hex digits."""
        digest = self._tenant.copy()
        digest.update(key.encode("utf-8", "surrogatepass"))
        return digest.hexdigest()


def fingerprint_state(version: str, content: tuple[Tensor, ...]) -> hashlib.blake2b:
    """The fingerprint of a request, before the bytes of its body are added."""
    state = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for part in (version.encode(), repr(content).encode()):
        state.update(len(part).to_bytes(4, "little") + part)
    return state
