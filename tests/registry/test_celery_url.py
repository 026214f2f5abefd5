"""celery_url: the broker's URL as Celery and kombu read it."""

from __future__ import annotations

from contextlib import closing

import pytest
import redis
from kombu.connection import Connection

from penstock.registry.celery_url import celery_url
from tests.servers import RedisServer


@pytest.mark.parametrize(
    "url",
    ["redis://localhost:6379/0", "redis://user:secret@host:6379/2?socket_timeout=5", "amqp://guest@host//"],
)
def test_other_urls_are_unchanged(url: str):
    """Celery reads a URL without a socket and without TLS as redis-py does."""
    assert celery_url(url) == url


def test_celery_reaches_the_database_of_a_socket(shared_redis: RedisServer, slot: str):
    """Through the converted URL, kombu and redis-py meet in the same database of the same server."""
    url = f"unix://{shared_redis.socket}?db=2"
    with Connection(celery_url(url)) as connection, closing(connection.SimpleQueue(slot)) as queue:
        queue.put("a message")
        with redis.Redis.from_url(url) as client:
            assert client.llen(slot) == 1
            client.delete(slot, f"_kombu.binding.{slot}")


def test_the_password_of_a_socket_is_kept():
    """The path, the password and the database of a unix socket are in the converted URL."""
    converted = celery_url("unix://:secret@/run/redis.sock?db=2")
    assert converted == "redis+socket://:secret@/run/redis.sock?virtual_host=2"


def test_a_socket_without_a_database_uses_database_0():
    """redis-py and Celery use the same database when the URL names none."""
    assert celery_url("unix:///run/redis.sock") == "redis+socket:///run/redis.sock?virtual_host=0"


def test_other_options_of_a_socket_are_kept():
    """An option of the URL that is not the database stays in the query."""
    assert celery_url("unix:///s?socket_timeout=5&db=1") == "redis+socket:///s?virtual_host=1&socket_timeout=5"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("rediss://host/0", "rediss://host/0?ssl_cert_reqs=required"),
        ("rediss://host/0?socket_timeout=5", "rediss://host/0?socket_timeout=5&ssl_cert_reqs=required"),
        ("rediss://host/0?ssl_cert_reqs=none", "rediss://host/0?ssl_cert_reqs=none"),
    ],
)
def test_certificates_are_checked_unless_the_url_says_otherwise(url: str, expected: str):
    """A TLS URL without an option requires a valid certificate; an explicit option stays."""
    assert celery_url(url) == expected
