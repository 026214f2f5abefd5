"""CF-055: the configuration of a deployment checks its fields."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from penstock import ConfigurationError, InvalidInput
from penstock.producers.ray_serve import RayServeConfig


def test_defaults_are_those_of_the_specification():
    """CF-055: telemetry and priority routing are on; a copy in another process is equal."""
    config = RayServeConfig()
    assert (config.enable_telemetry, config.enable_priority_routing, config.timeout_s) == (True, True, 30.0)
    assert pickle.loads(pickle.dumps(config)) == config  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"enable_telemetry": "no"}, "enable_telemetry is 'no'. Expected True or False"),
        ({"enable_priority_routing": 0}, "enable_priority_routing is 0. Expected True or False"),
        ({"timeout_s": 0}, "timeout_s is 0. Expected a positive number of seconds, or None"),
        ({"timeout_s": float("nan")}, "timeout_s is nan. Expected a positive number of seconds, or None"),
        ({"timeout_s": "30"}, "timeout_s is '30'. Expected a positive number of seconds, or None"),
    ],
)
def test_a_wrong_field_is_refused(fields: dict[str, Any], expected: str):
    """The error names the field, what it is and what was expected."""
    with pytest.raises(ConfigurationError) as refused:
        RayServeConfig(**fields)
    assert str(refused.value) == expected


def test_priority_follows_the_routing():
    """Off: every job is normal. A name that is no priority is refused in both cases."""
    on, off = RayServeConfig(), RayServeConfig(enable_priority_routing=False)
    assert (on.priority("low"), off.priority("low"), off.priority("critical")) == ("low", "normal", "normal")
    for config in (on, off):
        with pytest.raises(InvalidInput, match=r"Unknown priority 'hgih'\. Expected one of: critical, high"):
            config.priority("hgih")  # type: ignore[arg-type]
