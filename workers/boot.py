"""How a worker process begins and ends: Celery's spelling of the broker's URL, and a refusal in one line.

A process that cannot work says so and exits: after EXIT_CONFIGURATION a supervisor does not try again.
"""

from __future__ import annotations

import sys
from typing import Final, NoReturn
from urllib.parse import parse_qs, urlencode, urlsplit

from registry.errors import ConfigurationError, PenstockError

__all__ = ["EXIT_CONFIGURATION", "EXIT_TEMPORARY", "celery_url", "refuse"]

EXIT_CONFIGURATION: Final = 78
"""EX_CONFIG of sysexits.h."""
EXIT_TEMPORARY: Final = 75
"""EX_TEMPFAIL: the same process may work later."""


def celery_url(url: str) -> str:
    """A broker's URL as Celery spells it: sockets are redis+socket://, and TLS says that certificates are checked.

    >>> celery_url("unix://:secret@/run/redis.sock?db=2")
    'redis+socket://:secret@/run/redis.sock?virtual_host=2'
    """
    parts = urlsplit(url)
    if parts.scheme == "rediss" and "ssl_cert_reqs" not in parse_qs(parts.query):
        # redis-py checks unless told not to; Celery refuses a URL that does not say.
        return f"{url}{'&' if parts.query else '?'}ssl_cert_reqs=required"
    if parts.scheme != "unix":
        return url
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    query = {"virtual_host": options.pop("db", "0"), **options}
    return f"redis+socket://{parts.netloc}{parts.path}?{urlencode(query)}"


def refuse(error: PenstockError) -> NoReturn:
    """Say why this process cannot work, and end it."""
    sys.stderr.write(f"penstock: {error}\n")
    raise SystemExit(EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_TEMPORARY)
