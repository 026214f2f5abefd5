"""Keys of ours that hold another type, as another program leaves them."""

from __future__ import annotations

from typing import Any, Final

from penstock.registry.queues import key_type

__all__ = ["FOREIGN", "bytes_of", "is_foreign", "overwrite"]

FOREIGN: Final = b"of another program"


def overwrite(client: Any, key: str) -> None:
    """Put bytes of another type there: a string, or a list where a string belongs."""
    client.delete(key)
    if key_type(key) == "string":
        client.rpush(key, FOREIGN)
    else:
        client.set(key, FOREIGN)


def is_foreign(client: Any, key: str) -> bool:
    """Whether the key exists with a type that is not its own."""
    return client.type(key).decode() not in ("none", key_type(key))


def bytes_of(client: Any, key: str) -> object:
    """The bytes that `overwrite` has put there, or what is there instead."""
    return client.lindex(key, 0) if client.type(key) == b"list" else client.get(key)
