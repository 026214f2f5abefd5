"""What every process of a worker settles first: its settings, and the broker that they lead to.

    settings -> PENSTOCK_REDIS_URL, or the embedded stack that runs on this home -> settings that can connect

A process that cannot work says so in one line, and exits: with EXIT_CONFIGURATION a supervisor does not try again.
"""

from __future__ import annotations

import sys
from typing import Final, NoReturn
from urllib.parse import parse_qs, urlencode, urlsplit

from registry import local_stack
from registry.errors import ConfigurationError, PenstockError
from registry.settings import Settings

__all__ = ["EXIT_CONFIGURATION", "EXIT_TEMPORARY", "celery_url", "connected_settings", "refuse"]

EXIT_CONFIGURATION: Final = 78
"""EX_CONFIG of sysexits.h."""
EXIT_TEMPORARY: Final = 75
"""EX_TEMPFAIL: the same process may work later."""


def connected_settings() -> Settings:
    """The settings of this process, with a broker in them. Raises ConfigurationError when there is none."""
    settings = Settings.load()
    if settings.redis_url:
        return settings
    stack = local_stack.read(settings.home)
    if stack is None:
        raise ConfigurationError(
            "No broker. Expected its URL in PENSTOCK_REDIS_URL, or a stack that `penstock up` runs"
        )
    return Settings.load(overrides={"redis_url": stack.redis_url, "signing_keys": stack.signing_keys()})


def celery_url(url: str) -> str:
    """A broker's URL as Celery spells it: sockets are redis+socket://, the rest is the same.

    >>> celery_url("unix://:secret@/run/redis.sock?db=2")
    'redis+socket://:secret@/run/redis.sock?virtual_host=2'
    """
    if not url.startswith("unix://"):
        return url
    parts = urlsplit(url)
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    query = {"virtual_host": options.pop("db", "0"), **options}
    return f"redis+socket://{parts.netloc}{parts.path}?{urlencode(query)}"


def refuse(error: PenstockError) -> NoReturn:
    """Say why this process cannot work, and end it."""
    sys.stderr.write(f"penstock: {error}\n")
    raise SystemExit(EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_TEMPORARY)
