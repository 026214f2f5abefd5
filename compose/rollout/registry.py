"""Opens the registry of the settings, with an audit log that records each change before it is made."""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.compose.rollout.operator_keys import OperatorKeys
from penstock.registry.catalog import ModelRegistryClient
from penstock.registry.catalog.tables import Transition
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.audit import AuditLog

if TYPE_CHECKING:
    from penstock.registry.catalog.store import RegistryStore

__all__ = ["open_registry"]


def open_registry(
    settings: Settings, keys: OperatorKeys, store: RegistryStore | None = None, **options: Any
) -> ModelRegistryClient:
    """The registry of these settings, in the name of the user of this process.

    store: the registry's rows; None: the database of the settings. options: those of ModelRegistryClient.
    """
    return ModelRegistryClient(
        store or settings.registry_url,
        sign=keys.sign,
        verify=keys.verify,
        actor=_actor(),
        audit=_auditor(settings),
        **options,
    )


def _auditor(settings: Settings) -> Callable[[Transition], None] | None:
    """Records a change before it is made. A change that cannot be recorded raises ConfigurationError."""
    privacy = settings.inference.privacy

    def record(transition: Transition) -> None:
        try:
            AuditLog(privacy.audit_log_path, "models").record("transition", transition.as_data())
        except OSError as error:
            raise ConfigurationError(
                f"The audit log cannot be written ({error.strerror}), and nothing was changed. Expected room for it"
            ) from None

    return record if privacy.audit_log_enabled else None


def _actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # The user of a container may have no name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
