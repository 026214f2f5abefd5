"""The `penstock` command, also where its extra is not installed: then one line says so, with exit status 78.

    penstock status   ->  [cli]      commands that read or operate a stack
    penstock worker   ->  [worker]   commands that start workers

The base install serves programs that submit jobs, and has no command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Final

__all__ = ["EXTRAS", "STARTS_WORKERS", "main", "missing_package"]

EXTRAS: Final = {
    "cli": ("alembic", "celery", "click", "cryptography", "kombu", "packaging", "rich", "sqlalchemy"),
    "worker": ("prometheus_client",),
}
"""The packages that an extra adds, by the name that is imported; [worker] includes [cli]."""
STARTS_WORKERS: Final = frozenset({"demo", "up", "worker"})


def missing_package(extra: str) -> str:
    """The first package of an extra that cannot be imported here, or nothing."""
    packages = EXTRAS["cli"] + (EXTRAS["worker"] if extra == "worker" else ())
    # A package that is imported already may have replaced its module by one without a spec, as kombu does.
    return next((name for name in packages if name not in sys.modules and find_spec(name) is None), "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of these arguments, those of the process by default."""
    words = sys.argv[1:] if arguments is None else arguments
    extra = "worker" if STARTS_WORKERS.intersection(words) else "cli"
    if package := missing_package(extra):
        name = package.replace("_", "-")
        hint = f"pip install '.[{extra}]' in the checkout of Penstock"
        sys.stderr.write(f"Error: {name} is not installed. Expected: {hint}\n")
        sys.exit(os.EX_CONFIG)
    from penstock.compose.cli import main as command

    command(arguments)


if __name__ == "__main__":
    main()
