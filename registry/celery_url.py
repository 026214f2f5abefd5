"""A broker's URL -> the URL for Celery and kombu."""

from __future__ import annotations

from urllib.parse import parse_qs, urlencode, urlsplit

__all__ = ["celery_url"]


def celery_url(url: str) -> str:
    """A broker's URL in Celery's format: redis+socket:// for sockets, and an explicit check of certificates for TLS.

    >>> celery_url("unix://:secret@/run/redis.sock?db=2")
    'redis+socket://:secret@/run/redis.sock?virtual_host=2'
    """
    parts = urlsplit(url)
    if parts.scheme == "rediss" and "ssl_cert_reqs" not in parse_qs(parts.query):
        # redis-py checks certificates by default; Celery refuses a URL without the option.
        return f"{url}{'&' if parts.query else '?'}ssl_cert_reqs=required"
    if parts.scheme != "unix":
        return url
    options = {name: values[0] for name, values in parse_qs(parts.query).items()}
    query = {"virtual_host": options.pop("db", "0"), **options}
    return f"redis+socket://{parts.netloc}{parts.path}?{urlencode(query)}"
