"""The experiments of an operator's shell have the breakers of its broker, and its alert hooks."""

from __future__ import annotations

from contextlib import closing

import pytest

from penstock.compose.commands.experiment_access import opened
from penstock.compose.commands.registry_access import RegistryAccess
from penstock.registry.broker.breakers import CANDIDATE, BreakerLimits, breaker_name, new_breaker_id
from penstock.registry.broker.redis_breakers import RedisBreakers
from penstock.registry.errors import ConfigurationError
from penstock.safety.alerts import Alert
from tests.compose.commands.conftest import there as there
from tests.flow.shadow_stage import alerts_to
from tests.receiver import Receiver
from tests.servers import RedisServer


@pytest.fixture
def shell(there: dict[str, str], tmp_path) -> dict[str, str]:
    """The environment of an operator."""
    return {**there, "PENSTOCK_HOME": str(tmp_path)}


def test_breakers_are_those_of_the_broker(shell: dict[str, str], slot: str, shared_redis: RedisServer):
    """A shadow worker has opened one: commands of rollouts and of A/B experiments read it, and its reason."""
    name = breaker_name(slot, "2", CANDIDATE)
    with opened(RegistryAccess(shell)) as experiments, closing(RedisBreakers.from_url(shared_redis.url)) as end:
        assert experiments.why_stopped(slot, "2") == ""
        end.force_open_breaker(name, "drift: y.min_cosine", new_breaker_id(), BreakerLimits())
        assert experiments.why_stopped(slot, "2") == "drift: y.min_cosine"
        assert experiments.why_stopped(slot, "1") == ""


def test_alerts_go_to_the_hooks_of_the_settings(shell: dict[str, str]):
    """What waits at the end of the command is sent before the process ends."""
    with Receiver() as receiver:
        with opened(RegistryAccess({**shell, **alerts_to(receiver)})) as experiments:
            assert experiments.alerts.notify(Alert("rollout a 1", "rollout", "minilm", "it errs", 1.0, "2"))
        (call,) = receiver.calls
    assert (call.event["type"], call.event["data"]["reason"]) == ("safety.rollout", "it errs")


def test_webhook_without_a_secret_is_refused_at_once(shell: dict[str, str]):
    """A rollout whose alerts could not be sent does not begin."""
    environ = {**shell, "PENSTOCK_INFERENCE_SAFETY_ALERT_WEBHOOKS": "https://example.com/"}
    with pytest.raises(ConfigurationError, match="secret"), opened(RegistryAccess(environ)):
        pass
