"""The exit statuses of a worker process, and the end of one that cannot work.

A supervisor reads them (compose/stack/supervisor.py): it restarts the process after every status except
EXIT_CONFIGURATION, which a restart would not change.
"""

from __future__ import annotations

import sys
from typing import Final, NoReturn

from penstock.registry.errors import BrokerRefused, ConfigurationError, PenstockError

__all__ = ["EXIT_CONFIGURATION", "EXIT_TEMPORARY", "EXIT_UNHEALTHY", "exit_with", "status_of"]

EXIT_UNHEALTHY: Final = 70
"""EX_SOFTWARE of sysexits.h: a thread has died or hangs. Another process may work."""
EXIT_TEMPORARY: Final = 75
"""EX_TEMPFAIL: a server is away. The same process may work later."""
EXIT_CONFIGURATION: Final = 78
"""EX_CONFIG: the settings, the device or the models prevent the process from working, or the broker refuses it."""


def status_of(error: PenstockError) -> int:
    """The exit status for an error that ends the start of a process."""
    return EXIT_CONFIGURATION if isinstance(error, ConfigurationError | BrokerRefused) else EXIT_TEMPORARY


def exit_with(error: PenstockError) -> NoReturn:
    """Write the error to stderr in one line, and end the process with the status for its class."""
    sys.stderr.write(f"penstock: {error}\n")
    raise SystemExit(status_of(error))
