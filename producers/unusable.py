"""What takes the place of a connection that is gone for good. Each use raises ClientUnusable.

The place costs the calls of an open client nothing: they have no check of their own.
"""

from __future__ import annotations

from typing import Any, Final, NoReturn

from penstock.registry.errors import ClientUnusable

__all__ = ["CLOSED", "Unusable", "closed"]

_CLOSED_TEXT: Final = "This client was closed. Expected an open one"


class Unusable:
    """Raises ClientUnusable with `reason` for every attribute."""

    __slots__ = ("_reason",)

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            # Python and its debuggers ask objects for optional methods.
            raise AttributeError(name)
        raise ClientUnusable(self._reason)


CLOSED: Final[Any] = Unusable(_CLOSED_TEXT)
"""Takes the place of the connection and of the reply reader of a closed client."""


def closed() -> ClientUnusable:
    """The error of a call that a closed client cannot serve."""
    return ClientUnusable(_CLOSED_TEXT)
