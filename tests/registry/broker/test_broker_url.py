"""URLs of brokers: what is accepted, how it is shown, and what is said of all others."""

from __future__ import annotations

import asyncio

import pytest

from penstock import AsyncClient, Client
from penstock.registry.broker.broker_url import parse_broker_url
from penstock.registry.broker.redis_connection import open_redis
from penstock.registry.errors import ConfigurationError

FORMS = "Expected redis://host:6379/0, rediss://host:6379/0 (TLS) or unix:///path/redis.sock?db=0"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://user:hunter2@host/3?socket_timeout=5", "redis://host:6379/3"),
        ("rediss://:hunter2@host:7000", "rediss://host:7000/0"),
        ("redis://host/3?db=4", "redis://host:6379/4"),
        ("redis://", "redis://localhost:6379/0"),
        ("redis://[::1]:7/2", "redis://[::1]:7/2"),
        ("unix://:hunter2@/run/redis.sock?db=2", "the broker's unix socket, database 2"),
    ],
)
def test_an_address_is_shown_without_secrets(url: str, shown: str):
    """User, password, options and the path of a socket are left out."""
    assert str(parse_broker_url(url)) == shown


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        (None, "is None, as from an unset environment variable"),
        ("", "is empty"),
        (6379, "is of type int"),
        (b"redis://host", "is of type bytes"),
        ("localhost:6379", "has no scheme"),
        ("memory://", "has the scheme 'memory'"),
        ("http://host", "has the scheme 'http'"),
        ("redis://host/abc", "names a database that is no whole number from 0"),
        ("redis://host/1/2", "names a database that is no whole number from 0"),
        ("redis://host?db=-1", "names a database that is no whole number from 0"),
        ("redis://host:port/0", "has a port that is no number from 1 to 65535"),
        ("redis://host:65536/0", "has a port that is no number from 1 to 65535"),
        ("redis://[::1", "has a host that cannot be read"),
        ("unix://?db=0", "has no path of a unix socket"),
    ],
)
def test_other_urls_are_refused_when_the_client_is_made(url: str, problem: str):
    """Both clients say what is wrong and what is expected, before anything connects."""
    with pytest.raises(ConfigurationError) as refused:
        Client(url)
    assert str(refused.value).startswith(f"The broker's URL {problem}. {FORMS}")

    async def make() -> None:
        AsyncClient(url)

    with pytest.raises(ConfigurationError) as refused_too:
        asyncio.run(make())
    assert str(refused_too.value) == str(refused.value)


def test_an_unset_variable_is_told_of_the_client_of_the_environment():
    """`Client(os.environ.get("REDIS_URL"))` gives None."""
    with pytest.raises(ConfigurationError, match=r"Client\.from_env\(\) reads PENSTOCK_REDIS_URL"):
        Client(None)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter/2@host/0",
        "redis://:12/hunter2@host/0",
        "redis://:12#hunter2@host/0",
        "redis://:12?hunter2@host/0",
        "redis://:p@hunter2/x@host/0",
        "hunter2:more",
    ],
)
def test_a_password_that_is_not_escaped_stays_secret(url: str):
    """It moves to the place of the port, the database or the options: no such part is quoted."""
    with pytest.raises(ConfigurationError) as refused:
        parse_broker_url(url)
    assert "hunter" not in str(refused.value)
    assert "12" not in str(refused.value)


@pytest.mark.parametrize("option", ["sokcet_timeout=1", "socket_timeout=soon", "health_check_interval=x"])
def test_an_unusable_option_is_found_before_the_first_command(option: str):
    """An option that redis-py does not know is no TypeError of the first job."""
    with pytest.raises(ConfigurationError, match=r"redis://host:6379/0: the broker's URL has an option"):
        open_redis(f"redis://host/0?{option}", 1)
