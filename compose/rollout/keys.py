"""Who the operator is: the key that signs decisions, and the keys whose decisions are believed.

settings --> operator.pem, operator_public_keys --> OperatorKeys --> registry records, active versions, commands
"""

from __future__ import annotations

import os
from typing import NamedTuple

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.registry.signed import Signer, Verifier
from penstock.safety.keys import OperatorKey, PublicKeys

__all__ = ["OperatorKeys", "operator_keys"]

_PROBE = b"is this key one of those that are believed"


class OperatorKeys(NamedTuple):
    """`sign` is None without a private key, `verify` where no key is known; `public_text` is what workers are told."""

    sign: Signer | None
    verify: Verifier | None
    public_text: str


def operator_keys(settings: Settings, *, for_changes: bool = False) -> OperatorKeys:
    """The keys of these settings. Without public keys in them, the operator's own is the only one that is believed.

    for_changes: what will be written must be believed afterwards. A key is made, once, where the settings name no
    public keys; where they do, the private key has to be there and to be one of them. Raises ConfigurationError.
    """
    brought = settings.operator_public_keys
    key = _made(settings) if for_changes and not brought else _found(settings)
    public_text = brought or (key.public_text if key else "")
    known = PublicKeys.parse(public_text)
    if for_changes and (key is None or not known.verify(_PROBE, *key.sign(_PROBE))):
        what = "is not there" if key is None else "is none of the operators' keys"
        raise ConfigurationError(
            f"{settings.operator_key_file.name} {what}, and nobody would believe a decision without its signature. "
            "Expected in PENSTOCK_OPERATOR_KEY_FILE a key of PENSTOCK_OPERATOR_PUBLIC_KEYS"
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
        # Another command of this user was quicker, or the file says itself what is wrong with it.
        return OperatorKey.load(file)
