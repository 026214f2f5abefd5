"""The exit status of a process that cannot work, and its one line on stderr."""

from __future__ import annotations

import logging

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


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (
            ModuleNotFoundError("No module named 'prometheus_client'", name="prometheus_client"),
            "prometheus_client is not installed. Expected: pip install '.[worker]' in the checkout of Penstock",
        ),
        (
            ModuleNotFoundError("No module named 'torch.nn'", name="torch.nn"),
            "torch is not installed. Expected: pip install '.[torch]' in the checkout of Penstock",
        ),
        (
            ModuleNotFoundError("No module named 'redis'", name="redis"),
            "redis is not installed. Expected: pip install '.' in the checkout of Penstock",
        ),
        (
            ModuleNotFoundError("No module named 'nonesuch'", name="nonesuch"),
            "nonesuch is not installed. Expected the package that provides this module",
        ),
        (
            ImportError("libcudart.so.12: cannot open\n shared object file"),
            "A package cannot be imported: libcudart.so.12: cannot open shared object file. Expected an installation "
            "that is whole",
        ),
    ],
    ids=["extra of a worker", "extra of a format", "base install", "foreign package", "broken library"],
)
def test_a_missing_package_ends_the_process_for_good(error: ImportError, line: str, capsys: pytest.CaptureFixture[str]):
    """A restart installs nothing: the status is that of a configuration error, and the one line says what to type."""
    with pytest.raises(SystemExit) as ended:
        exit_with(error)
    assert ended.value.code == EXIT_CONFIGURATION
    assert capsys.readouterr().err == f"penstock: {line}\n"


def test_the_traceback_is_written_at_debug(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture):
    """With the logger at DEBUG the traceback comes first, and the line stays the last one."""
    caplog.set_level(logging.DEBUG, "penstock")
    with pytest.raises(SystemExit):
        exit_with(ConfigurationError("No broker"))
    first, *_, last = capsys.readouterr().err.splitlines()
    assert first.endswith("ConfigurationError: No broker")
    assert last == "penstock: No broker"


def test_statuses_are_those_of_sysexits():
    """EX_SOFTWARE, EX_TEMPFAIL and EX_CONFIG: other supervisors know these numbers."""
    assert (EXIT_UNHEALTHY, EXIT_TEMPORARY, EXIT_CONFIGURATION) == (70, 75, 78)
