"""The keys of the audit log: those of the settings, else one that is made once on this machine.

PENSTOCK_AUDIT_KEY, or <home>/audit.key (mode 0600) --> audit_keys --> the MACs of every entry
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.registry.audit_keys import new_audit_key, parse_audit_keys
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.private_file import read_private, write_new

__all__ = ["audit_key_file", "audit_keys"]

_EXPECTED: Final = "Expected PENSTOCK_AUDIT_KEY, or a PENSTOCK_HOME that this user may write to"


def audit_key_file(settings: Settings) -> Path:
    """The file of the key while the settings have none."""
    return settings.home / "audit.key"


def audit_keys(settings: Settings, *, for_writing: bool = False) -> tuple[bytes, ...]:
    """The keys, the writing one first. A key of the settings does not hide the one in the file: older chains have it.

    for_writing: a key is made if there is none. Raises ConfigurationError.
    """
    file = audit_key_file(settings)
    keys = parse_audit_keys(settings.audit_key.get_secret_value() if settings.audit_key else "")
    try:
        if for_writing and not keys and not file.exists():
            # Of several processes that start at once, one writes its key, and all read it.
            with suppress(FileExistsError):
                write_new(file, f"{new_audit_key()}\n".encode())
        if not for_writing or not keys:
            keys += _read(file)
    except OSError as error:
        raise ConfigurationError(f"The audit log's key cannot be used ({error.strerror}). {_EXPECTED}") from None
    if not keys:
        raise ConfigurationError("There is no key of the audit log here. Expected the PENSTOCK_AUDIT_KEY that wrote it")
    return keys


def _read(file: Path) -> tuple[bytes, ...]:
    try:
        text = read_private(file, "The audit log's key")
    except FileNotFoundError:
        return ()
    keys = parse_audit_keys(text.decode(errors="replace").strip())
    if not keys:
        raise ConfigurationError(f"{file.name} is empty. Expected the audit log's key as hex or base64")
    return keys
