"""The `penstock` command, also where its extra is not installed: then one line says so, with exit status 78.

    penstock status   ->  [cli]      commands that read or operate a stack
    penstock worker   ->  [worker]   commands that start workers
    penstock serve    ->  [gateway]  the HTTP gateway

The base install serves programs that submit jobs, and has no command line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Final

from penstock.registry.extras import missing_package, not_installed

__all__ = ["STARTS_WORKERS", "main"]

STARTS_WORKERS: Final = frozenset({"canary", "demo", "up", "worker"})
_SERVES: Final = "serve"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of these arguments, those of the process by default."""
    words = sys.argv[1:] if arguments is None else arguments
    extra = "worker" if STARTS_WORKERS.intersection(words) else "gateway" if _SERVES in words else "cli"
    if name := missing_package(extra):
        sys.stderr.write(f"Error: {not_installed(name, extra)}\n")
        sys.exit(os.EX_CONFIG)
    from penstock.compose.cli import main as command

    command(arguments)


if __name__ == "__main__":
    main()
