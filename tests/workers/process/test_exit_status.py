"""The exit status of a process that cannot work, and its one line on stderr."""

from __future__ import annotations

import pytest

from penstock.registry.errors import BrokerRefused, BrokerUnavailable, ConfigurationError, PenstockError
from penstock.workers.process.exit_status import EXIT_CONFIGURATION, EXIT_TEMPORARY, EXIT_UNHEALTHY, exit_with


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigurationError("No broker. Expected PENSTOCK_REDIS_URL"), EXIT_CONFIGURATION),
        (BrokerRefused("redis://host:6379/0 refuses the user or the password"), EXIT_CONFIGURATION),
        (BrokerUnavailable("The broker does not answer"), EXIT_TEMPORARY),
    ],
)
def test_the_status_follows_the_class_of_the_error(
    error: PenstockError, status: int, capsys: pytest.CaptureFixture[str]
):
    """A supervisor gives up after a configuration error and a broker that refuses; else it tries again."""
    with pytest.raises(SystemExit) as ended:
        exit_with(error)
    assert ended.value.code == status
    assert capsys.readouterr().err == f"penstock: {error}\n"


def test_statuses_are_those_of_sysexits():
    """EX_SOFTWARE, EX_TEMPFAIL and EX_CONFIG: other supervisors know these numbers."""
    assert (EXIT_UNHEALTHY, EXIT_TEMPORARY, EXIT_CONFIGURATION) == (70, 75, 78)
