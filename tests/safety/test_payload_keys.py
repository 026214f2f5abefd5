"""The keys of envelopes: a process that must seal and cannot does not start."""

from __future__ import annotations

import base64
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from penstock import AsyncClient, Client
from penstock.registry.envelope import Keyring
from penstock.registry.errors import ConfigurationError, MissingRequirement
from penstock.registry.settings import Settings
from penstock.safety.payload_keys import envelope_keys
from tests.payload_keys import DATA_KEY, DATA_KEY_TEXT
from tests.servers import ROOT

SIGNING_KEY = "k1:" + base64.b64encode(b"s" * 32).decode()
ON: dict[str, dict[str, Any]] = {
    "on": {"privacy.seal_payloads": "on"},
    "hashes_only": {"privacy.mode": "hashes_only"},
    "persisted_encrypted": {"privacy.mode": "persisted_encrypted"},
    "hashes_only of the cache": {"cache.privacy_mode": "hashes_only"},
}
OFF: dict[str, dict[str, Any]] = {
    "ephemeral": {},
    "off": {"privacy.seal_payloads": "off"},
    "off in hashes_only": {"privacy.mode": "hashes_only", "privacy.seal_payloads": "off"},
}


def load(**overrides: Any) -> Settings:
    return Settings.load(environ={}, overrides=overrides)


def seals(keyring: Keyring) -> bool:
    """Whether it has a key and seals; one without a key must not say so."""
    assert keyring.body_keys is not None or not keyring.seals
    return keyring.seals


@pytest.mark.parametrize("overrides", ON.values(), ids=ON)
@pytest.mark.parametrize("text", [DATA_KEY_TEXT, DATA_KEY_TEXT.upper(), base64.b64encode(DATA_KEY).decode()])
def test_payloads_are_sealed_in_the_private_modes(text: str, overrides: dict[str, Any]):
    """With the key as hex digits or base64; what one form seals, the other one opens."""
    settings = load(l2_encryption_key=text, signing_keys=SIGNING_KEY, **overrides)
    keyring = envelope_keys(settings)
    assert seals(keyring)
    assert keyring.ids == ("k1",)
    hex_keys = envelope_keys(load(l2_encryption_key=DATA_KEY_TEXT)).body_keys
    assert keyring.body_keys is not None
    assert hex_keys is not None
    assert hex_keys.open(keyring.body_keys.seal(b"plain", b"bound"), b"bound") == b"plain"
    assert settings.inference.withholds_texts
    assert not settings.keyring.seals


@pytest.mark.parametrize("overrides", OFF.values(), ids=OFF)
def test_a_key_alone_opens_and_does_not_seal(overrides: dict[str, Any]):
    """Where sealing is off: such a process reads what others have sealed."""
    keyring = envelope_keys(load(l2_encryption_key=DATA_KEY_TEXT, **overrides))
    assert (seals(keyring), keyring.body_keys is not None) == (False, True)
    assert envelope_keys(load(**overrides)).body_keys is None


@pytest.mark.parametrize("overrides", ON.values(), ids=ON)
def test_without_a_key_nothing_starts(overrides: dict[str, Any]):
    """The error names the variable of the key, and the setting that chooses plaintext. Readers of headers go on."""
    settings = load(**overrides)
    expected = r"PENSTOCK_L2_ENCRYPTION_KEY is not set. .*PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS=off"
    with pytest.raises(ConfigurationError, match=expected):
        envelope_keys(settings)
    for client in (Client, AsyncClient):
        with pytest.raises(ConfigurationError, match="There is no data key"):
            client("redis://127.0.0.1:1", settings=settings)
    with pytest.raises(ConfigurationError, match="There is no data key"):
        Client.in_memory({"double": lambda x: x * 2}, settings=settings)
    reader = envelope_keys(settings, may_lack=True)
    assert (reader.body_keys, reader.seals) == (None, True)


def test_a_client_without_the_package_is_told_which_extra_it_needs():
    """`cryptography` is no part of the base install: without sealing a client works, and with sealing it does not."""
    program = f"""
import sys
sys.modules["cryptography"] = None
from penstock.registry.errors import MissingRequirement
from penstock.registry.settings import Settings
from penstock.safety.payload_keys import envelope_keys
key = {{"l2_encryption_key": "{DATA_KEY_TEXT}"}}
assert envelope_keys(Settings.load(environ={{}}, overrides=key)).body_keys is None
try:
    envelope_keys(Settings.load(environ={{}}, overrides=key | {{"privacy.seal_payloads": "on"}}))
except MissingRequirement as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "pip install '.[encryption]'" in done.stdout
    assert "SEAL_PAYLOADS=off" in done.stdout
    assert issubclass(MissingRequirement, ConfigurationError)


def test_the_extra_has_the_package():
    """The one that the error names."""
    import tomllib

    extras = tomllib.loads((Path(ROOT) / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert any(each.startswith("cryptography") for each in extras["encryption"])


@pytest.mark.parametrize(("lane", "is_open"), [("auto", False), ("trusted", False), ("off", False)])
def test_the_task_endpoint_is_closed_where_payloads_are_sealed(lane: str, is_open: bool):
    """Celery's broker would hold arguments and results in plaintext."""
    settings = load(**{"celery.lane": lane, "privacy.seal_payloads": "on", "l2_encryption_key": DATA_KEY_TEXT})
    assert settings.is_lane_open is is_open
    assert load(**{"celery.lane": "trusted"}).is_lane_open
