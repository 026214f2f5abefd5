"""What the extras of the distribution bring, and whether it is here. Imports nothing of it.

find_spec of each package -> the first one that is missing -> the line that says what to install
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from typing import Final

__all__ = ["EXTRAS", "missing_package", "not_installed"]

EXTRAS: Final = {
    "cli": ("alembic", "celery", "click", "cryptography", "h11", "kombu", "packaging", "re2", "rich", "sqlalchemy"),
    "worker": ("prometheus_client",),
    "gateway": (
        *("grpc", "grpc_health", "grpc_reflection", "google.protobuf"),
        *("gunicorn", "httptools", "prometheus_client", "tokenizers", "uvicorn", "uvloop", "websockets"),
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


def missing_package(extra: str) -> str:
    """The first distribution of an extra whose package cannot be imported here, or nothing."""
    packages = EXTRAS["cli"] + (() if extra == "cli" else EXTRAS[extra])
    # A package that is imported already may have replaced its module by one without a spec, as kombu does.
    missing = next((name for name in packages if name not in sys.modules and not _is_found(name)), "")
    return _DISTRIBUTIONS.get(missing, missing.replace("_", "-"))


def not_installed(distribution: str, extra: str) -> str:
    """The line for a distribution that is missing."""
    return f"{distribution} is not installed. Expected: pip install '.[{extra}]' in the checkout of Penstock"


def _is_found(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        # The package around a module, such as `google`, is missing, too.
        return False
