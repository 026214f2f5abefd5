"""Data keys that a key in an HSM wraps, with SoftHSM: what the file has, what the token has, and what is refused."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.hsm import PREFIX, Hsm, open_hsm, refuse_last_try
from tests.hsm import LABEL, PIN, SoftHsm
from tests.servers import ROOT, require_module

Load = Callable[..., Settings]
pkcs11 = require_module("pkcs11")


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SoftHsm:
    """A token of this test."""
    token = SoftHsm(tmp_path / "hsm")
    monkeypatch.setenv("SOFTHSM2_CONF", token.environment["SOFTHSM2_CONF"])
    return token


@pytest.fixture
def load(token: SoftHsm, tmp_path: Path) -> Load:
    """Settings of a process that uses the token."""
    base = {name: value for name, value in token.environment.items() if name.startswith("PENSTOCK_")}
    return lambda **environ: Settings.load(environ={"PENSTOCK_HOME": str(tmp_path / "home")} | base | environ)


def opened(settings: Settings, *, makes_keys: bool = False) -> Any:
    """A session with the token of these settings."""
    pin = settings.pkcs11_pin.get_secret_value() if settings.pkcs11_pin else ""
    return open_hsm(settings.inference.privacy, pin, makes_keys=makes_keys)


def made(settings: Settings, count: int = 1) -> list[str]:
    """Entries of new data keys, after their wrapping key was made."""
    with opened(settings, makes_keys=True) as hsm:
        hsm.make_wrapping_key()
        return [hsm.new_entry() for _ in range(count)]


def refusal(settings: Settings, use: Callable[[Hsm], object] = lambda _: None) -> str:
    """The error of a use of the token, in one line without the PIN."""
    with pytest.raises(ConfigurationError) as refused, opened(settings, makes_keys=True) as hsm:
        use(hsm)
    assert "\n" not in str(refused.value)
    assert PIN not in str(refused.value)
    assert "Expected" in str(refused.value)
    return str(refused.value)


@contextmanager
def session(token: SoftHsm, *, rw: bool = False) -> Iterator[Any]:
    """A look into the token without our code."""
    library = pkcs11.lib(str(token.module))
    try:
        with library.get_token(token_label=LABEL).open(user_pin=PIN, rw=rw) as found:
            yield found
    finally:
        library.finalize()


def test_wrapped_keys_open_in_their_token(load: Load):
    """CF-028: entries name the wrapping key, hold no key in the clear, and open to distinct keys of 32 bytes."""
    settings = load()
    entries = made(settings, 3)
    with opened(settings) as hsm:
        keys = hsm.open_all(entries)
        assert hsm.open_all(entries[1:]) == keys[1:]
    assert {len(key) for key in keys} == {32}
    assert len({*keys}) == 3
    for entry, key in zip(entries, keys, strict=True):
        prefix, label, encoded = entry.split(":")
        assert (f"{prefix}:", label) == (PREFIX, "penstock")
        wrapped = base64.b64decode(encoded)
        assert len(wrapped) == 40
        assert key[:8] not in wrapped


def test_token_keeps_the_wrapping_key_alone(load: Load, token: SoftHsm):
    """The wrapping key cannot be read from the token, and no data key stays there."""
    made(load(), 3)
    with session(token) as found:
        (key,) = found.get_objects()
        assert key[pkcs11.Attribute.LABEL] == "penstock"
        assert key[pkcs11.Attribute.SENSITIVE]
        assert not key[pkcs11.Attribute.EXTRACTABLE]
        assert key[pkcs11.Attribute.VALUE_LEN] == 32
        with pytest.raises(pkcs11.exceptions.AttributeSensitive):
            key[pkcs11.Attribute.VALUE]


def test_library_is_closed_after_use(load: Load, token: SoftHsm):
    """After the keys are read, and after an error, the library of the HSM is not initialised in the process."""
    settings = load()
    made(settings)
    assert not pkcs11.lib.__globals__["_loaded"][str(token.module)].initialized
    refusal(load(PENSTOCK_PKCS11_PIN="wrong"))
    assert not pkcs11.lib.__globals__["_loaded"][str(token.module)].initialized


def test_a_retired_wrapping_key_still_opens(load: Load):
    """New data keys use the label of the settings; old entries name the label of their own time."""
    (old,) = made(load())
    settings = load(PENSTOCK_INFERENCE_PRIVACY_PKCS11_KEY="penstock-2027")
    (new,) = made(settings)
    assert new.startswith("wrapped:penstock-2027:")
    with opened(settings) as hsm:
        assert len({*hsm.open_all([new, old])}) == 2


def test_every_changed_bit_is_refused(load: Load):
    """An entry with a flipped bit, or with the bytes of another key, is an error and never another key."""
    settings = load()
    first, second = (base64.b64decode(entry.rpartition(":")[2]) for entry in made(settings, 2))
    changed = [first[:8] + second[8:], first[:32] + second[32:]]
    for bit in range(8 * len(first)):
        flipped = bytearray(first)
        flipped[bit // 8] ^= 1 << bit % 8
        changed.append(bytes(flipped))
    with opened(settings) as hsm:
        for wrapped in changed:
            with pytest.raises(ConfigurationError, match="did not unwrap data key 1"):
                hsm.open_all([f"{PREFIX}penstock:{base64.b64encode(wrapped).decode()}"])


@pytest.mark.parametrize(
    "entry", ["", "ab" * 32, "wrapped:", "wrapped:penstock", "wrapped:penstock:AAAA", f"wrapped::{'A' * 54}=="]
)
def test_entries_of_another_form_are_refused(entry: str, load: Load):
    """A key that is not wrapped is not accepted beside an HSM; the error names its place and shows none of it."""
    message = refusal(load(), lambda hsm: hsm.open_all([entry]))
    assert message.startswith("Data key 1 is not wrapped. Expected wrapped:LABEL:BASE64")
    assert "ab" * 32 not in message


def test_a_wrong_pin_is_refused(load: Load):
    """The error names the variable and not the PIN, as without a PIN; the right one works afterwards."""
    made(load())
    message = refusal(load(PENSTOCK_PKCS11_PIN="wrong"))
    assert message.startswith("The token refused the PIN, which was tried once")
    assert "PENSTOCK_PKCS11_PIN" in message
    assert refusal(load(PENSTOCK_PKCS11_PIN="")).startswith("The HSM has no PIN. Expected the PIN of the token in PENS")
    with opened(load()) as hsm:
        hsm.new_entry()


def test_no_pin_is_tried_where_it_could_lock_the_token():
    """A token that is locked, or would be by one more wrong PIN, is left to the operator."""
    flags = pkcs11.TokenFlag
    refuse_last_try(flags.TOKEN_INITIALIZED | flags.USER_PIN_COUNT_LOW)
    with pytest.raises(ConfigurationError, match="PENSTOCK_PKCS11_PIN is not tried"):
        refuse_last_try(flags.TOKEN_INITIALIZED | flags.USER_PIN_COUNT_LOW | flags.USER_PIN_FINAL_TRY)
    with pytest.raises(ConfigurationError, match="The token is locked"):
        refuse_last_try(flags.TOKEN_INITIALIZED | flags.USER_PIN_LOCKED)


def test_missing_parts_are_named(load: Load, token: SoftHsm, tmp_path: Path):
    """No library, a file that is none, no token, two tokens of one label, no wrapping key: each error says which."""
    module, label = "PENSTOCK_INFERENCE_PRIVACY_PKCS11_MODULE", "PENSTOCK_INFERENCE_PRIVACY_PKCS11_TOKEN"
    assert module in refusal(load(**{module: ""}))
    assert module in refusal(load(**{module: str(tmp_path / "none.so")}))
    (tmp_path / "text.so").write_text("no library")
    assert "did not load its library" in refusal(load(**{module: str(tmp_path / "text.so")}))
    message = refusal(load(**{label: "other"}))
    assert "no token 'other'" in message
    assert label in message
    message = refusal(load(), lambda hsm: hsm.new_entry())
    assert "no AES key 'penstock'" in message
    assert "--make-wrapping-key" in message
    token.add_token(LABEL)
    assert f"several tokens {LABEL!r}" in refusal(load())


def test_unfit_wrapping_keys_are_refused(load: Load, token: SoftHsm):
    """Two keys of one label, and a key that may not wrap, are errors; a label that is taken is not used again."""
    (entry,) = made(load())
    assert "'penstock' already" in refusal(load(), lambda hsm: hsm.make_wrapping_key())
    other = load(PENSTOCK_INFERENCE_PRIVACY_PKCS11_KEY="signs")
    with session(token, rw=True) as found:
        found.generate_key(
            pkcs11.KeyType.AES, 256, label="signs", store=True, capabilities=pkcs11.MechanismFlag.ENCRYPT
        )
        found.generate_key(pkcs11.KeyType.AES, 256, label="penstock", store=True)
    assert "may not wrap keys" in refusal(other, lambda hsm: hsm.new_entry())
    signs = entry.replace(":penstock:", ":signs:")
    assert "may not wrap keys" in refusal(other, lambda hsm: hsm.open_all([signs]))
    assert "several AES keys 'penstock'" in refusal(load(), lambda hsm: hsm.open_all([entry]))


def test_without_the_package_the_extra_is_named(token: SoftHsm, tmp_path: Path):
    """Where python-pkcs11 is not installed the error says how to install it."""
    program = (
        "import sys; sys.modules['pkcs11'] = None\n"
        "from penstock.registry.errors import ConfigurationError\n"
        "from penstock.registry.settings import Settings\n"
        "from penstock.safety.keys import load_data_keys\n"
        "try:\n    load_data_keys(Settings.load())\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    file = tmp_path / "data.key"
    file.write_text(f"wrapped:penstock:{base64.b64encode(bytes(40)).decode()}\n")
    file.chmod(0o600)
    environment = {
        **token.environment,
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(ROOT),
        "PENSTOCK_HOME": str(tmp_path),
        "PENSTOCK_INFERENCE_PRIVACY_MODE": "persisted_encrypted",
    }
    command = [sys.executable, "-c", program]
    ran = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert "python-pkcs11 cannot be imported" in ran.stdout
    assert "pip install '.[hsm]'" in ran.stdout
