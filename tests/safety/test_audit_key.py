"""The keys of the audit log: from the settings, or from a file that is made once; others are refused."""

from __future__ import annotations

import base64
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.audit_key import audit_key_file, audit_keys

HEX, BASE64 = "ab" * 32, base64.b64encode(b"q" * 40).decode()


def settings(home: Path, key: str = "") -> Settings:
    return Settings.load(environ={"PENSTOCK_HOME": str(home), "PENSTOCK_AUDIT_KEY": key}, cwd=home)


def test_keys_are_hex_or_base64(tmp_path: Path):
    """PENSTOCK_AUDIT_KEY: the first key writes, all of them verify."""
    assert audit_keys(settings(tmp_path, f"{HEX}, {BASE64}")) == (bytes.fromhex(HEX), b"q" * 40)
    assert audit_keys(settings(tmp_path, BASE64), for_writing=True) == (b"q" * 40,)
    assert not audit_key_file(settings(tmp_path)).exists()


@pytest.mark.parametrize(
    "text", ["ab" * 31, base64.b64encode(b"q" * 31).decode(), "not base64!", "schlüssel", f"{HEX},x"]
)
def test_a_key_that_is_too_short_or_unreadable_is_refused(tmp_path: Path, text: str):
    """The settings refuse it, say what was expected, and do not show it."""
    with pytest.raises(ConfigurationError, match=r"PENSTOCK_AUDIT_KEY.*at least 32 random bytes") as refusal:
        settings(tmp_path, text)
    assert text not in str(refusal.value)


def test_without_a_key_one_is_made_once(tmp_path: Path):
    """Threads and processes that begin at once share it; only its owner may read it."""
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: audit_keys(settings(tmp_path), for_writing=True), range(8)))
    ((key,),) = found
    assert (len(key), audit_keys(settings(tmp_path))) == (32, (key,))
    assert stat.S_IMODE((tmp_path / "audit.key").stat().st_mode) == 0o600
    assert audit_keys(settings(tmp_path, HEX)) == (bytes.fromhex(HEX), key), "older chains need the key of the file"


def test_reading_makes_no_key(tmp_path: Path):
    """A verification without a key says so."""
    with pytest.raises(
        ConfigurationError, match=r"There is no key of the audit log here\. Expected the PENSTOCK_AUDIT"
    ):
        audit_keys(settings(tmp_path))
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("mode", "text", "problem"),
    [(0o640, HEX, "Expected a file that only its owner"), (0o600, "", "is empty"), (0o600, "ab", "not usable")],
)
def test_an_unusable_key_file_is_refused(tmp_path: Path, mode: int, text: str, problem: str):
    """Never a chain without a key, or with a key that others know."""
    file = tmp_path / "audit.key"
    file.write_text(text)
    file.chmod(mode)
    with pytest.raises(ConfigurationError, match=problem):
        audit_keys(settings(tmp_path), for_writing=True)


def test_an_unwritable_home_is_refused(tmp_path: Path):
    """The error says what was expected, and names no folder."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigurationError, match=r"The audit log's key cannot be used \(Not a directory\)") as refusal:
        audit_keys(settings(tmp_path / "file"), for_writing=True)
    assert str(tmp_path) not in str(refusal.value)
