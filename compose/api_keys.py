"""A change of one API key, recorded: audit log (begun) -> registry's database -> audit log (done).

The gateways see it within a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from penstock.registry.errors import PenstockError

if TYPE_CHECKING:
    from penstock.registry.catalog.api_keys import SqlApiKeys
    from penstock.registry.settings import Settings

__all__ = ["change_api_key"]

T = TypeVar("T")


def change_api_key(settings: Settings, operation: str, key_id: str, change: Callable[[SqlApiKeys], T]) -> T:
    """What `change` returns. operation: as the audit log names it, such as "create API key".

    Raises RegistryUnavailable, InvalidInput for a key that is not there, and OSError for an audit log that cannot be
    written: then nothing has changed.
    """
    from penstock.compose.rollout.audit_log import audit_logger
    from penstock.registry.catalog.api_keys import SqlApiKeys
    from penstock.safety.keys import key_audit

    with audit_logger(settings, "keys") as log:
        audit = key_audit(log)
        audit(operation, "begun", {"key": key_id})
        try:
            done = change(SqlApiKeys(settings.registry_url))
        except PenstockError:
            audit(operation, "failed", {"key": key_id})
            raise
        audit(operation, "done", {"key": key_id})
    return done
