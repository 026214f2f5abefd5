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
from importlib.util import find_spec
from typing import Final

__all__ = ["EXTRAS", "STARTS_WORKERS", "main", "missing_package"]

EXTRAS: Final = {
    "cli": ("alembic", "celery", "click", "cryptography", "h11", "kombu", "packaging", "re2", "rich", "sqlalchemy"),
    "worker": ("prometheus_client",),
    "gateway": (
        *("grpc", "grpc_health", "grpc_reflection", "google.protobuf"),
        *("gunicorn", "httptools", "prometheus_client", "uvicorn", "uvloop", "websockets"),
    ),
}
"""The packages that an extra adds, by the name that is imported; [worker] and [gateway] include [cli]."""
_DISTRIBUTIONS: Final = {
    "google.protobuf": "protobuf",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "re2": "google-re2",
}
"""The names of those whose distribution has another name than the package."""
STARTS_WORKERS: Final = frozenset({"canary", "demo", "up", "worker"})
_SERVES: Final = "serve"


def missing_package(extra: str) -> str:
    """The first package of an extra that cannot be imported here, or nothing."""
    packages = EXTRAS["cli"] + (() if extra == "cli" else EXTRAS[extra])
    # A package that is imported already may have replaced its module by one without a spec, as kombu does.
    return next((name for name in packages if name not in sys.modules and find_spec(name) is None), "")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command of these arguments, those of the process by default."""
    words = sys.argv[1:] if arguments is None else arguments
    extra = "worker" if STARTS_WORKERS.intersection(words) else "gateway" if _SERVES in words else "cli"
    if package := missing_package(extra):
        name = _DISTRIBUTIONS.get(package, package.replace("_", "-"))
        hint = f"pip install '.[{extra}]' in the checkout of Penstock"
        sys.stderr.write(f"Error: {name} is not installed. Expected: {hint}\n")
        sys.exit(os.EX_CONFIG)
    from penstock.compose.cli import main as command

    command(arguments)


if __name__ == "__main__":
    main()
