"""The exit statuses of a worker process, and the end of one that cannot work.

A supervisor reads them (compose/stack/supervisor.py): it restarts the process after every status except
EXIT_CONFIGURATION, which a restart would not change.
"""

from __future__ import annotations

import logging
import re
import sys
import traceback
from typing import Final, NoReturn

from penstock.registry.errors import BrokerRefused, ConfigurationError, PenstockError

__all__ = ["EXIT_CONFIGURATION", "EXIT_TEMPORARY", "EXIT_UNHEALTHY", "exit_with", "status_of"]

EXIT_UNHEALTHY: Final = 70
"""EX_SOFTWARE of sysexits.h: a thread has died or hangs. Another process may work."""
EXIT_TEMPORARY: Final = 75
"""EX_TEMPFAIL: a server is away. The same process may work later."""
EXIT_CONFIGURATION: Final = 78
"""EX_CONFIG: the settings, the device, the models or missing packages prevent the process from working, or the broker
refuses it."""
_EXTRAS: Final = ("", "worker", "torch", "onnx", "flower", "postgres", "mlflow", "presidio", "cli", "hsm", "otel")
"""Where several extras bring a package, the first of these is named; empty: the base install."""
_REQUIREMENT: Final = re.compile(r"([\w.-]+)(?:.*extra == '([\w-]+)')?")


def status_of(error: PenstockError | ImportError) -> int:
    """The exit status for an error that ends the start of a process."""
    is_permanent = isinstance(error, ConfigurationError | BrokerRefused | ImportError)
    return EXIT_CONFIGURATION if is_permanent else EXIT_TEMPORARY


def exit_with(error: PenstockError | ImportError) -> NoReturn:
    """Write the error to stderr in one line, and end the process with the status for its class.

    The traceback is written first when the level of the logger `penstock` is DEBUG.
    """
    if logging.getLogger("penstock").isEnabledFor(logging.DEBUG):
        traceback.print_exception(error)
    message = _unimportable(error) if isinstance(error, ImportError) else str(error)
    sys.stderr.write(f"penstock: {message}\n")
    raise SystemExit(status_of(error))


def _unimportable(error: ImportError) -> str:
    """What is not installed, and how to install it; for other errors of an import, their text on one line."""
    if not isinstance(error, ModuleNotFoundError) or not error.name:
        return f"A package cannot be imported: {' '.join(str(error).split())}. Expected an installation that is whole"
    name = error.name.partition(".")[0]
    extra = _extra_of(name)
    if extra is None:
        return f"{name} is not installed. Expected the package that provides this module"
    checkout = f".[{extra}]" if extra else "."
    return f"{name} is not installed. Expected: pip install '{checkout}' in the checkout of Penstock"


def _extra_of(module: str) -> str | None:
    """The extra of Penstock that brings a module; empty for the base install, None for a foreign package."""
    # Here: the `penstock` command reads this module's statuses, and --help is quick.
    from importlib import metadata

    package = module.replace("_", "-").lower()
    try:
        stated = metadata.requires("penstock") or []
    except metadata.PackageNotFoundError:
        return None
    matches = filter(None, (_REQUIREMENT.match(each.replace('"', "'")) for each in stated))
    found = {match[2] or "" for match in matches if match[1].lower().replace("_", "-") == package}
    return next((extra for extra in _EXTRAS if extra in found), None)
