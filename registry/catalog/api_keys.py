"""The API keys in the registry's database: one row for each key. Rows are never deleted.

    `penstock keys` -> add, revoke, replace_secret -> rows with a revision -> since -> the copies of the gateways

Each change has the next revision. A reader asks for the last one that it has seen and for later ones. The unique index
lets one of two writers wait for the other, so that no earlier revision appears after a later one. A database that was
restored from a backup uses the revisions after the backup again, for other changes; see producers/gateway/key_copy.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from msgspec import structs
from sqlalchemy import Connection, func, insert, select, update

from penstock.registry.api_keys import ApiKey, KeyLimits, ShownKey, new_secret
from penstock.registry.catalog.database import Database
from penstock.registry.catalog.tables import api_keys
from penstock.registry.errors import InvalidInput, TransitionConflict, shown

__all__ = ["SqlApiKeys"]

_TRIES: Final = 5
_LIMITS: Final = KeyLimits.__struct_fields__


class SqlApiKeys:
    """The rows in a database. Calls raise RegistryUnavailable. Raises ConfigurationError for an unusable URL."""

    def __init__(self, url: str) -> None:
        self._database = Database(url)

    def since(self, revision: int) -> list[ApiKey]:
        """The keys that were changed after this revision, in the order of their changes. 0: all keys.

        A database file that does not exist has no keys, and is not made.
        """
        if not self._database.exists:
            return []
        changed = select(api_keys).where(api_keys.c.revision > revision).order_by(api_keys.c.revision)
        with self._database.reading() as connection:
            return [_key(row) for row in connection.execute(changed).mappings()]

    def add(self, key: ApiKey) -> ApiKey:
        """Stores a new key, and returns it with its revision."""
        return self._change(lambda connection, revision: _insert(connection, structs.replace(key, revision=revision)))

    def revoke(self, key_id: str, now: int) -> ApiKey:
        """Makes a key invalid for good. One that is revoked stays as it is. Raises InvalidInput for an unknown id."""

        def apply(connection: Connection, revision: int) -> ApiKey:
            key = _found(connection, key_id)
            if key.revoked_at is not None:
                return key
            return _update(connection, structs.replace(key, revoked_at=now, revision=revision))

        return self._change(apply)

    def replace_secret(self, key_id: str, now: float) -> ShownKey:
        """Gives a key a new secret; the old one opens no more.

        Raises InvalidInput for an unknown id, and for a key that is revoked or expired.
        """
        text, digest = new_secret(key_id)

        def apply(connection: Connection, revision: int) -> ApiKey:
            key = _found(connection, key_id)
            if (status := key.status(now)) != "active":
                raise InvalidInput(f"Key {key_id} is {status}. Expected an active one, or `penstock keys create`")
            return _update(connection, structs.replace(key, digest=digest, revision=revision))

        return ShownKey(self._change(apply), text)

    def _change(self, apply: Callable[[Connection, int], ApiKey]) -> ApiKey:
        """One change under the next revision; repeated when another writer has taken that one."""
        for _ in range(_TRIES - 1):
            with suppress(TransitionConflict):
                return self._try(apply)
        return self._try(apply)

    def _try(self, apply: Callable[[Connection, int], ApiKey]) -> ApiKey:
        with self._database.writing() as connection:
            last = connection.execute(select(func.max(api_keys.c.revision))).scalar()
            return apply(connection, (last or 0) + 1)


def _found(connection: Connection, key_id: str) -> ApiKey:
    row = connection.execute(select(api_keys).where(api_keys.c.id == key_id)).mappings().first()
    if row is None:
        raise InvalidInput(f"Unknown API key {shown(key_id)}. Expected an id of `penstock keys list`")
    return _key(row)


def _insert(connection: Connection, key: ApiKey) -> ApiKey:
    connection.execute(insert(api_keys).values(_row(key)))
    return key


def _update(connection: Connection, key: ApiKey) -> ApiKey:
    connection.execute(update(api_keys).where(api_keys.c.id == key.id).values(_row(key)))
    return key


def _row(key: ApiKey) -> dict[str, Any]:
    row = structs.asdict(key)
    limits = structs.asdict(row.pop("limits"))
    return {**row, **limits, "models": json.dumps(key.models)}


def _key(row: Mapping[Any, Any]) -> ApiKey:
    facts = dict(row)
    limits = KeyLimits(**{name: facts.pop(name) for name in _LIMITS})
    return ApiKey(**{**facts, "models": tuple(json.loads(facts["models"])), "limits": limits})
