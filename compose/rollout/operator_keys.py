"""The operator's private key, which signs decisions, and the public keys whose decisions are trusted.

settings --> operator.pem, operator_public_keys --> OperatorKeys --> registry records, active versions, commands
"""

from __future__ import annotations

import os
from typing import NamedTuple

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.registry.signed import Signer, Verifier
from penstock.safety.operator_key import OperatorKey, PublicKeys

__all__ = ["OperatorKeys", "operator_keys"]

_PROBE = b"is this key one of the trusted keys"


class OperatorKeys(NamedTuple):
    """`sign` is None without a private key, `verify` without any public key; `public_text` is for the workers."""

    sign: Signer | None
    verify: Verifier | None
    public_text: str


def operator_keys(settings: Settings, *, for_changes: bool = False) -> OperatorKeys:
    """The keys of these settings. Without public keys in the settings, only the operator's own key is trusted.

    for_changes: the key must be trusted afterwards. Without public keys in the settings, a private key is made once.
    With public keys, the private key must exist and belong to one of them. Raises ConfigurationError.
    """
    configured = settings.operator_public_keys
    key = _made(settings) if for_changes and not configured else _found(settings)
    public_text = configured or (key.public_text if key else "")
    known = PublicKeys.parse(public_text)
    if for_changes and (key is None or not known.verify(_PROBE, *key.sign(_PROBE))):
        problem = "does not exist" if key is None else "is none of the operators' keys"
        raise ConfigurationError(
            f"{settings.operator_key_file.name} {problem}, and decisions are trusted only with the signature of such a "
            "key. Expected in PENSTOCK_OPERATOR_KEY_FILE a key of PENSTOCK_OPERATOR_PUBLIC_KEYS"
        )
    return OperatorKeys(key.sign if key else None, known.verify if len(known) else None, public_text)


def _found(settings: Settings) -> OperatorKey | None:
    file = settings.operator_key_file
    return OperatorKey.load(file) if os.path.lexists(file) else None


def _made(settings: Settings) -> OperatorKey:
    file = settings.operator_key_file
    try:
        return _found(settings) or OperatorKey.generate(file)
    except ConfigurationError:
        if not os.path.lexists(file):
            raise
        # Another command of this user made it first, or `load` raises the problem of the file.
        return OperatorKey.load(file)
