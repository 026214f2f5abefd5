"""How a worker process that cannot work ends: one line, and an exit status.

A process that cannot work says so and exits: after EXIT_CONFIGURATION a supervisor does not try again.
"""

from __future__ import annotations

import sys
from typing import Final, NoReturn

from penstock.registry.errors import ConfigurationError, PenstockError

__all__ = ["EXIT_CONFIGURATION", "EXIT_TEMPORARY", "exit_with"]

EXIT_CONFIGURATION: Final = 78
"""EX_CONFIG of sysexits.h."""
EXIT_TEMPORARY: Final = 75
"""EX_TEMPFAIL: the same process may work later."""


def exit_with(error: PenstockError) -> NoReturn:
    """Say why this process cannot work, and end it."""
    sys.stderr.write(f"penstock: {error}\n")
    raise SystemExit(EXIT_CONFIGURATION if isinstance(error, ConfigurationError) else EXIT_TEMPORARY)
