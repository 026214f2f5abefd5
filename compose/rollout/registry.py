"""Opens the registry of the settings, with an audit log that records each change before it is made."""

from __future__ import annotations

import getpass
import os
import socket
from typing import TYPE_CHECKING, Any

from penstock.compose.rollout.audit_log import audit_logger
from penstock.compose.rollout.operator_keys import OperatorKeys
from penstock.registry.catalog import ModelRegistryClient
from penstock.registry.catalog.tables import Transition
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.audit import REGISTRY_CHANGE, AuditLogger

if TYPE_CHECKING:
    from penstock.registry.catalog.store import RegistryStore

__all__ = ["open_registry"]


def open_registry(
    settings: Settings, keys: OperatorKeys, store: RegistryStore | None = None, **options: Any
) -> ModelRegistryClient:
    """The registry of these settings, in the name of the user of this process.

    store: the registry's rows; None: the database of the settings. options: those of ModelRegistryClient.
    """
    log = _Auditor(settings, store) if settings.inference.privacy.audit_log_enabled else None
    return ModelRegistryClient(
        store or settings.registry_url,
        sign=keys.sign,
        verify=keys.verify,
        actor=_actor(),
        audit=log.record if log else None,
        committed=log.anchor if log else lambda: None,
        **options,
    )


class _Auditor:
    """Records changes of the registry in the audit log, which is opened for the first one."""

    def __init__(self, settings: Settings, store: RegistryStore | None) -> None:
        self._settings = settings
        self._reaches_stores = store is None
        self._log: AuditLogger | None = None

    def record(self, transition: Transition) -> None:
        """Records a change before it is made. Raises ConfigurationError when it cannot be recorded."""
        self._log = self._log or audit_logger(self._settings, "registry", reaches_stores=self._reaches_stores)
        facts = transition.as_data()
        try:
            self._log.log_event(REGISTRY_CHANGE, transition.name, result=str(transition.action), details=facts)
        except OSError as error:
            raise ConfigurationError(
                f"The audit log cannot be written ({error.strerror}), and nothing was changed. Expected room for it"
            ) from None

    def anchor(self) -> None:
        """Stores the end of the log. Not before the commit: the change holds the lock of the database until then."""
        if self._log is not None:
            self._log.anchor()


def _actor() -> str:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        # The user of a container may have no name.
        user = f"uid {os.getuid()}"
    return f"{user}@{socket.gethostname()}"
