"""The audit log of the settings, and the places that keep the ends of its chains: registry and broker.

AuditLogger -- put --> registry's database, broker --> stored_heads --> verify_log --> damage
                            ^--------------------- the ends that were found sound ---'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.registry.audit_heads import AuditHead, AuditHeads
from penstock.registry.errors import PenstockError
from penstock.registry.settings import Settings
from penstock.safety.audit import AuditConfig, AuditLogger
from penstock.safety.audit_key import audit_keys
from penstock.safety.audit_reader import AuditVerification, verify
from penstock.safety.privacy import redactor_of

__all__ = ["VerifiedLog", "audit_logger", "verify_log"]

_TIMEOUT_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class VerifiedLog:
    """A verification. heads: by store, how many heads it had. problems: by store, why it could not be read."""

    verification: AuditVerification
    heads: Mapping[str, int]
    problems: Mapping[str, str]


def audit_logger(settings: Settings, writer: str, *, reaches_stores: bool = True) -> AuditLogger:
    """The audit log of a command. Raises ConfigurationError when it cannot be written.

    reaches_stores: whether this process may connect to registry and broker. If not, the next verification stores the
    ends.
    """
    heads = list(_stores(settings).values()) if reaches_stores else []
    redact = redactor_of(settings.inference.privacy).redact
    return AuditLogger(config=AuditConfig.of(settings), writer=writer, redact=redact, heads=heads)


def verify_log(settings: Settings, folders: Sequence[Path] = ()) -> VerifiedLog:
    """Checks the audit log with the keys of the settings and with the stored heads.

    The ends of sound chains are stored in the registry: workers store theirs in the broker only, which may forget.
    folders: None for that of the settings. Raises ConfigurationError without a key, and OSError.
    """
    keys = audit_keys(settings)
    stores = _stores(settings)
    found: dict[str, dict[str, AuditHead]] = {}
    problems: dict[str, str] = {}
    for name, store in stores.items():
        try:
            found[name] = store.all()
        except PenstockError as problem:
            problems[name] = str(problem)
    verification = verify(folders or [settings.inference.privacy.audit_log_path], keys, list(found.values()))
    with suppress(PenstockError):
        stores["registry"].put(verification.ends)
    return VerifiedLog(verification, {name: len(heads) for name, heads in found.items()}, problems)


def _stores(settings: Settings) -> dict[str, AuditHeads]:
    # SQLAlchemy is slow to import, and only these commands need it.
    from penstock.registry.broker.redis_audit_heads import RedisAuditHeads
    from penstock.registry.catalog.audit_heads import SqlAuditHeads

    stores: dict[str, AuditHeads] = {"registry": SqlAuditHeads(settings.registry_url)}
    if settings.redis_url:
        stores["broker"] = RedisAuditHeads.from_url(settings.redis_url, timeout_s=_TIMEOUT_S)
    return stores
