"""The keys of the envelopes of a process: those that sign them, and the data keys that encrypt their bodies.

    Settings --> envelope_keys --> Keyring --> registry/envelope.py and its templates

A process that must seal payloads and has no data key does not start: it would write them in plaintext.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.registry.errors import ConfigurationError, MissingRequirement

if TYPE_CHECKING:
    from penstock.registry.envelope import Keyring
    from penstock.registry.settings import Settings
    from penstock.safety.sealing import DataKeys

__all__ = ["envelope_keys"]

_OR_OFF: Final = "or PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS=off to send inputs and results in plaintext"


def envelope_keys(settings: Settings, data_keys: DataKeys | None = None, *, may_lack: bool = False) -> Keyring:
    """The keyring of a process with these settings; bodies are sealed if privacy.seal_payloads says so.

    data_keys: those of the settings, if they were read already. A data key that is here opens sealed bodies, also where
    bodies are not sealed. may_lack: for readers, which report sealed bodies that they cannot open.
    Raises ConfigurationError where bodies must be sealed and no data key is here, and MissingRequirement where the
    package `cryptography` is not.
    """
    seals = settings.inference.seals_payloads
    keys = data_keys or (_needed(settings) if seals and not may_lack else _found(settings, asks_hsm=may_lack and seals))
    return replace(settings.keyring, body_keys=keys, seals=seals)


def _needed(settings: Settings) -> DataKeys:
    # Here: most clients seal nothing, and read no keys.
    from penstock.safety.keys import read_data_keys

    try:
        return read_data_keys(settings)
    except MissingRequirement:
        raise MissingRequirement(
            "Payloads must be sealed here, and the package cryptography is not installed. Expected: "
            f"pip install '.[encryption]', {_OR_OFF}"
        ) from None
    except ConfigurationError as error:
        raise ConfigurationError(
            "Payloads must be sealed here (privacy.seal_payloads is on, or auto with a privacy mode other than "
            f"ephemeral). {error}, {_OR_OFF}"
        ) from None


def _found(settings: Settings, *, asks_hsm: bool) -> DataKeys | None:
    """The data keys of the settings; None: there are none, or they cannot be read. asks_hsm: logs in to an HSM, too."""
    privacy, text = settings.inference.privacy, settings.l2_encryption_key
    source = privacy.encryption_key_source
    if source == "env":
        is_here = text is not None and bool(text.get_secret_value())
    else:
        is_here = asks_hsm if source == "hsm" else privacy.encryption_key_file.exists()
    if not is_here:
        return None
    try:
        from penstock.safety.keys import read_data_keys

        return read_data_keys(settings)
    except ConfigurationError:
        return None
