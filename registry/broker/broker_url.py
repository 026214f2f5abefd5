"""A broker's URL: checked before anything connects, and shown in messages without user, password and path.

    redis://user:password@host:6379/0   rediss://host:6379/0 (TLS)   unix:///path/redis.sock?db=0

A message never quotes a part of the URL but its scheme: an unescaped character moves the password to another part.
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from penstock.registry.errors import ConfigurationError

__all__ = ["BrokerAddress", "parse_broker_url"]

_FORMS: Final = "redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///path/redis.sock?db=0"
_SCHEMES: Final = ("redis", "rediss", "unix")
_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]{0,19})://", re.IGNORECASE)
_ESCAPED: Final = "In a password, write / # ? @ : and % as %2F %23 %3F %40 %3A %25"


class BrokerAddress(NamedTuple):
    """Where a broker is. `host` is empty for a unix socket, whose path is never shown."""

    scheme: str
    host: str
    port: int
    database: int

    @property
    def is_tls(self) -> bool:
        """Whether the URL asks for TLS."""
        return self.scheme == "rediss"

    def __str__(self) -> str:
        if not self.host:
            return f"the broker's unix socket, database {self.database}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.scheme}://{host}:{self.port}/{self.database}"


def parse_broker_url(url: object) -> BrokerAddress:
    """The address in the URL of a broker. Raises ConfigurationError for any other value.

    >>> str(parse_broker_url("redis://user:secret@example.org/3"))
    'redis://example.org:6379/3'
    """
    if not isinstance(url, str):
        # The value of an environment variable that is not set is None.
        found = "None, as from an unset environment variable" if url is None else f"of type {type(url).__name__}"
        raise _unusable(f"is {found}", "Client.from_env() reads PENSTOCK_REDIS_URL or finds the stack of `penstock up`")
    if not url:
        raise _unusable("is empty")
    if not url.startswith(tuple(f"{scheme}://" for scheme in _SCHEMES)):
        scheme = _SCHEME.match(url)
        raise _unusable(f"has the scheme {scheme[1]!r}" if scheme else "has no scheme")
    try:
        parts = urlsplit(url)
    except ValueError:
        raise _unusable("has a host that cannot be read", _ESCAPED) from None
    if parts.scheme == "unix":
        if not parts.path.strip("/"):
            raise _unusable("has no path of a unix socket")
        return BrokerAddress("unix", "", 0, _database(parts))
    if parts.fragment or ("@" in f"{parts.path}{parts.query}" and "@" not in parts.netloc):
        # The password has a # / or ? that is not escaped: the host and the port are parts of it.
        raise _unusable("has a user or password that cannot be read", _ESCAPED)
    return BrokerAddress(parts.scheme, parts.hostname or "localhost", _port(parts), _database(parts))


def _port(parts: SplitResult) -> int:
    try:
        return parts.port or 6379
    except ValueError:
        raise _unusable("has a port that is no number from 1 to 65535", _ESCAPED) from None


def _database(parts: SplitResult) -> int:
    """The option db wins over the path, as in redis-py."""
    in_path = "" if parts.scheme == "unix" else unquote(parts.path).strip("/")
    named = parse_qs(parts.query, keep_blank_values=True).get("db", [in_path])[0]
    if not named and "db=" not in parts.query:
        return 0
    if not (named.isascii() and named.isdecimal()) or len(named) > 9:
        raise _unusable("names a database that is no whole number from 0", _ESCAPED)
    return int(named)


def _unusable(problem: str, hint: str = "") -> ConfigurationError:
    return ConfigurationError(f"The broker's URL {problem}. Expected {_FORMS}{f'. {hint}' if hint else ''}")
