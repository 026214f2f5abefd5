"""Data keys that are wrapped by a key in an HSM, through PKCS#11 (python-pkcs11, the extra [hsm]).

    AES key in the token (wraps, never leaves) + entry of the key file --unwrapped once at start--> data key
    entry = wrapped:<label of the wrapping key>:<base64 of the data key, wrapped as RFC 3394 says>

Only data keys pass through the HSM, never data. A PIN is tried once: a token locks itself after some wrong ones.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, cast

from penstock.registry.data_keys import KEY_BYTES
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings_sections import PrivacyConfig

if TYPE_CHECKING:
    from pkcs11 import Attribute, Key, MechanismFlag, Object, Session, Token
    from pkcs11._pkcs11 import lib as Library

__all__ = ["PREFIX", "Hsm", "open_hsm", "refuse_last_try"]

PREFIX: Final = "wrapped:"
_WRAPPED_BYTES: Final = KEY_BYTES + 8


class Hsm:
    """A session with a token. label: of the key that wraps new data keys."""

    def __init__(self, session: Session, label: str) -> None:
        self._session = session
        self._label = label

    def open_all(self, entries: Sequence[str]) -> list[bytes]:
        """The data keys of these entries. Raises ConfigurationError."""
        return [self._unwrapped(entry, place) for place, entry in enumerate(entries, 1)]

    def new_entry(self) -> str:
        """The entry of a data key that the token made now. Raises ConfigurationError."""
        from pkcs11 import KeyType, Mechanism, WrapMixin

        with _refusals("wrap a data key"):
            wrapping = self._wrapping_key(self._label)
            if not isinstance(wrapping, WrapMixin):
                raise _unfit(self._label)
            key = self._session.generate_key(KeyType.AES, 8 * KEY_BYTES, capabilities=_use(), template=_readable())
            wrapped = wrapping.wrap_key(key, mechanism=Mechanism.AES_KEY_WRAP)
        return f"{PREFIX}{self._label}:{base64.b64encode(wrapped).decode()}"

    def make_wrapping_key(self) -> None:
        """Makes the wrapping key in the token. Raises ConfigurationError, also when its label is taken."""
        from pkcs11 import Attribute, KeyType, MechanismFlag

        with _refusals("make a wrapping key"):
            if self._objects({Attribute.LABEL: self._label}):
                raise ConfigurationError(
                    f"The token has an object {self._label!r} already. Expected a new label in "
                    "PENSTOCK_INFERENCE_PRIVACY_PKCS11_KEY, or no --make-wrapping-key"
                )
            self._session.generate_key(
                KeyType.AES,
                8 * KEY_BYTES,
                label=self._label,
                store=True,
                capabilities=MechanismFlag.WRAP | MechanismFlag.UNWRAP,
                template={Attribute.SENSITIVE: True, Attribute.EXTRACTABLE: False},
            )

    def _unwrapped(self, entry: str, place: int) -> bytes:
        from pkcs11 import Attribute, KeyType, Mechanism, ObjectClass, UnwrapMixin

        label, wrapped = _parsed(entry, place)
        with _refusals(f"unwrap data key {place}"):
            wrapping = self._wrapping_key(label)
            if not isinstance(wrapping, UnwrapMixin):
                raise _unfit(label)
            key = wrapping.unwrap_key(
                ObjectClass.SECRET_KEY,
                KeyType.AES,
                wrapped,
                mechanism=Mechanism.AES_KEY_WRAP,
                store=False,
                capabilities=_use(),
                template=_readable(),
            )
            return bytes(key[Attribute.VALUE])

    def _wrapping_key(self, label: str) -> Key:
        from pkcs11 import Attribute, KeyType, ObjectClass

        wanted = {Attribute.CLASS: ObjectClass.SECRET_KEY, Attribute.KEY_TYPE: KeyType.AES, Attribute.LABEL: label}
        found = self._objects(wanted)
        if not found:
            raise ConfigurationError(
                f"The token has no AES key {label!r}. Expected the label of the wrapping key in "
                "PENSTOCK_INFERENCE_PRIVACY_PKCS11_KEY; `penstock keys generate --make-wrapping-key` makes it"
            )
        if len(found) > 1:
            raise ConfigurationError(f"The token has several AES keys {label!r}. Expected one")
        return cast("Key", found[0])

    def _objects(self, wanted: dict[Attribute, object]) -> list[Object]:
        # Not Session.get_key: it leaves a search open when it finds several, which fails after the library is closed.
        return [*self._session.get_objects(wanted)]


@contextmanager
def open_hsm(privacy: PrivacyConfig, pin: str, *, makes_keys: bool = False) -> Iterator[Hsm]:
    """A session with the token of the settings, which ends with the block. One try with the PIN.

    makes_keys: the session may write to the token. Raises ConfigurationError.
    """
    try:
        import pkcs11
    except ImportError:
        raise ConfigurationError(
            "The package python-pkcs11 cannot be imported, and the key source hsm needs it. Expected: pip install "
            "'.[hsm]' in the checkout of Penstock"
        ) from None
    module = privacy.pkcs11_module
    if module is None or not module.is_file():
        raise ConfigurationError(
            "The PKCS#11 library of the HSM does not exist. Expected its path in "
            "PENSTOCK_INFERENCE_PRIVACY_PKCS11_MODULE"
        )
    if not pin:
        raise ConfigurationError("The HSM has no PIN. Expected the PIN of the token in PENSTOCK_PKCS11_PIN")
    with _refusals("load its library"):
        library = pkcs11.lib(str(module))
    try:
        session = _logged_in(_token(library, privacy.pkcs11_token), pin, makes_keys=makes_keys)
        try:
            yield Hsm(session, privacy.pkcs11_key)
        finally:
            session.close()
    finally:
        # No thread or connection of the vendor's library stays in a worker.
        library.finalize()


def refuse_last_try(flags: int) -> None:
    """Raises ConfigurationError when the token is locked, or would be locked by one more wrong PIN."""
    from pkcs11 import TokenFlag

    if flags & TokenFlag.USER_PIN_LOCKED:
        raise _locked()
    if flags & TokenFlag.USER_PIN_FINAL_TRY:
        raise ConfigurationError(
            "One more wrong PIN would lock the token, so PENSTOCK_PKCS11_PIN is not tried. Expected a login with the "
            "tools of the HSM first"
        )


def _token(library: Library, label: str) -> Token:
    from pkcs11.exceptions import MultipleTokensReturned, NoSuchToken

    expected = "Expected the label of one token in PENSTOCK_INFERENCE_PRIVACY_PKCS11_TOKEN"
    try:
        with _refusals("list its tokens"):
            return library.get_token(token_label=label)
    except NoSuchToken:
        raise ConfigurationError(f"The HSM has no token {label!r}. {expected}") from None
    except MultipleTokensReturned:
        raise ConfigurationError(f"The HSM has several tokens {label!r}. {expected}") from None


def _logged_in(token: Token, pin: str, *, makes_keys: bool) -> Session:
    from pkcs11.exceptions import PinIncorrect, PinInvalid, PinLenRange, PinLocked

    with _refusals("open a session"):
        refuse_last_try(token.flags)
        try:
            return token.open(rw=makes_keys, user_pin=pin)
        except (PinIncorrect, PinInvalid, PinLenRange):
            raise ConfigurationError(
                "The token refused the PIN, which was tried once: a token locks itself after some wrong ones. Expected "
                "its PIN in PENSTOCK_PKCS11_PIN"
            ) from None
        except PinLocked:
            raise _locked() from None


@contextmanager
def _refusals(action: str) -> Iterator[None]:
    """Makes a ConfigurationError of the library's other errors inside the block, without their texts."""
    from pkcs11.exceptions import MultipleTokensReturned, NoSuchToken, PKCS11Error

    try:
        yield
    except (MultipleTokensReturned, NoSuchToken):
        raise
    except PKCS11Error as error:
        raise ConfigurationError(
            f"The HSM did not {action} ({type(error).__name__}). Expected a token that wraps AES keys by "
            "CKM_AES_KEY_WRAP, and entries that this token wrapped"
        ) from None


def _readable() -> dict[Attribute, bool]:
    """The attributes of a data key: this process may read it, and it lives as long as the session."""
    from pkcs11 import Attribute

    return {Attribute.SENSITIVE: False, Attribute.EXTRACTABLE: True}


def _use() -> MechanismFlag:
    from pkcs11 import MechanismFlag

    return MechanismFlag.ENCRYPT | MechanismFlag.DECRYPT


def _parsed(entry: str, place: int) -> tuple[str, bytes]:
    """The label of the wrapping key, and the wrapped data key. Raises ConfigurationError."""
    label, _, encoded = entry.removeprefix(PREFIX).partition(":")
    try:
        wrapped = base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):  # letters outside of ASCII are a ValueError
        wrapped = b""
    if not entry.startswith(PREFIX) or not label or len(wrapped) != _WRAPPED_BYTES:
        raise ConfigurationError(
            f"Data key {place} is not wrapped. Expected {PREFIX}LABEL:BASE64 with the label of the wrapping key and "
            f"{_WRAPPED_BYTES} bytes; `penstock keys generate` makes such an entry"
        )
    return label, wrapped


def _unfit(label: str) -> ConfigurationError:
    return ConfigurationError(
        f"The key {label!r} of the token may not wrap keys. Expected an AES key with CKA_WRAP and CKA_UNWRAP"
    )


def _locked() -> ConfigurationError:
    return ConfigurationError("The token is locked. Expected its PIN to be reset with the tools of the HSM")
