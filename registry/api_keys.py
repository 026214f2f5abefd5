"""API keys of the gateway: the text that a caller shows, and the record that the registry keeps. Pure.

    new_api_key -> (ApiKey with a digest -> the registry's database, text -> shown once)
    text of a caller -> parse_api_key -> id -> ApiKey.opens: a comparison in constant time

A text is `pk_<id>_<secret>`: the id finds the record, and the 256 bits of the secret prove the caller. The database has
the SHA-256 of the whole text: nobody can guess so many bits, so that a slow hash would protect nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from typing import Final, Literal, NamedTuple, TypeAlias, get_args

import msgspec

from penstock.registry.errors import InvalidInput, described
from penstock.registry.queues import parse_name

__all__ = [
    "UNKNOWN_DIGEST",
    "ApiKey",
    "KeyLimits",
    "KeyRole",
    "ShownKey",
    "digest_of",
    "new_api_key",
    "new_secret",
    "parse_api_key",
]

KeyRole: TypeAlias = Literal["admin", "user", "readonly"]
"""`readonly` looks at jobs and models, `user` also submits and cancels, `admin` also does what operators do."""

_TEXT: Final = re.compile(r"pk_([0-9a-f]{12})_[A-Za-z0-9_-]{43}")
_MOST_LABEL: Final = 100
UNKNOWN_DIGEST: Final = secrets.token_hex(32)
"""Stands for the digest of a key that does not exist, so that an unknown id costs the same comparison."""


class KeyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What a key may spend; 0: no limit of its own. Minutes slide; days and months are those of UTC."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    requests_per_day: int = 0
    requests_per_month: int = 0


class ApiKey(msgspec.Struct, frozen=True, kw_only=True):
    """One API key, without its secret. models: those that it may use; empty: all. Times are in unix seconds.

    revision: counts the changes of all keys; this key had its last change at this one.
    """

    id: str
    label: str
    digest: str
    role: KeyRole
    tenant: str
    models: tuple[str, ...]
    limits: KeyLimits
    created_at: int
    expires_at: int | None = None
    revoked_at: int | None = None
    revision: int = 0

    def opens(self, digest: str, now: float) -> bool:
        """Whether this is the digest of the key's text, and the key is valid at `now`."""
        is_same = hmac.compare_digest(digest, self.digest)
        return is_same and self.status(now) == "active"

    def status(self, now: float) -> Literal["active", "expired", "revoked"]:
        """Whether the key is valid at `now`."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "active"


class ShownKey(NamedTuple):
    """A new key with its text, which is nowhere else."""

    key: ApiKey
    text: str


def parse_api_key(text: str) -> str | None:
    """The id in a caller's text; None for a text that is no key."""
    found = _TEXT.fullmatch(text)
    return found[1] if found else None


def digest_of(text: str) -> str:
    """The SHA-256 of a caller's text, as 64 hex digits."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def new_api_key(
    label: str,
    *,
    now: int,
    role: KeyRole = "user",
    tenant: str = "default",
    models: tuple[str, ...] = (),
    expires_at: int | None = None,
    limits: KeyLimits | None = None,
) -> ShownKey:
    """A key that no registry has yet. Raises InvalidInput for an argument that no key can have."""
    if not 0 < len(label) <= _MOST_LABEL or not label.isprintable():
        raise InvalidInput(f"The label is {described(label)}. Expected 1 to {_MOST_LABEL} printable characters")
    if role not in get_args(KeyRole):
        raise InvalidInput(f"The role is {described(role)}. Expected one of: {', '.join(get_args(KeyRole))}")
    if expires_at is not None and expires_at <= now:
        raise InvalidInput("The key would have expired already. Expected a time in the future")
    limits = limits or KeyLimits()
    if min(msgspec.structs.astuple(limits)) < 0:
        raise InvalidInput("A limit is negative. Expected 1 or more, or 0 for none")
    key_id = secrets.token_hex(6)
    text, digest = new_secret(key_id)
    key = ApiKey(
        id=key_id,
        label=label,
        digest=digest,
        role=role,
        tenant=parse_name("tenant", tenant),
        models=tuple(parse_name("model", name) for name in models),
        limits=limits,
        created_at=now,
        expires_at=expires_at,
    )
    return ShownKey(key, text)


def new_secret(key_id: str) -> tuple[str, str]:
    """(text, digest) of a new secret for the key with this id."""
    text = f"pk_{key_id}_{secrets.token_urlsafe(32)}"
    return text, digest_of(text)
