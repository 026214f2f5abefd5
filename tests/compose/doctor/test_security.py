"""Addresses, file modes and keys, as the checks judge them; test_doctor.py has the whole examination."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.compose.doctor.security import check_operator, check_security, check_signing, check_transport
from penstock.registry.settings import Settings
from penstock.safety.keys import OperatorKey

Load = Callable[..., Settings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Settings of a shell with these variables and a private home."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    return lambda **environ: Settings.load(environ={"PENSTOCK_HOME": str(home)} | environ, cwd=tmp_path)


@pytest.mark.parametrize("url", ["unix:///s", "redis://localhost", "redis://127.9.9.9", "redis://[::1]:6379/0"])
def test_the_loopback_needs_neither_password_nor_tls(url: str, load: Load):
    """A connection that does not leave the machine has no finding."""
    assert list(check_transport(url, load())) == []


@pytest.mark.parametrize("url", ["redis://:pw@10.0.0.1", "redis://:pw@[2001:db8::1]", "redis://:pw@localhost.example"])
def test_other_addresses_need_tls(url: str, load: Load):
    """Every other host is another machine, also one whose name begins like the loopback's."""
    assert [finding.status for finding in check_transport(url, load())] == ["warning"]


@pytest.mark.parametrize("variable", ["PENSTOCK_INFERENCE_PRIVACY_MODE", "PENSTOCK_INFERENCE_CACHE_PRIVACY_MODE"])
def test_encryption_at_rest_forbids_plain_text_on_the_network(variable: str, load: Load):
    """Where stored inputs must be encrypted, an unencrypted connection is broken and not only a warning."""
    settings = load(**{variable: "persisted_encrypted"})
    assert [finding.status for finding in check_transport("redis://:pw@10.0.0.1", settings)] == ["broken"]
    assert list(check_transport("rediss://:pw@10.0.0.1", settings)) == []


def test_a_private_home_without_settings_is_secure(load: Load):
    """A shell without variables has no finding about files, metrics or Celery."""
    assert list(check_security(load())) == []


def test_metrics_beyond_the_loopback_need_a_token(load: Load, tmp_path: Path):
    """Open metrics are broken; with a token that only this user can read they are not."""
    token = tmp_path / "token"
    token.write_text("hunter2")
    token.chmod(0o600)
    opened = {"PENSTOCK_METRICS_HOST": "0.0.0.0"}  # noqa: S104 - the subject of the test
    assert [finding.status for finding in check_security(load(**opened))] == ["broken"]
    assert list(check_security(load(**opened, PENSTOCK_METRICS_BEARER_FILE=str(token)))) == []


def test_a_trusted_root_that_every_user_can_write_is_broken(load: Load, tmp_path: Path):
    """Any user could put code there that a worker runs; the fix is the command that closes the folder."""
    root = tmp_path / "models"
    root.mkdir()
    root.chmod(0o777)
    (finding,) = check_security(load(PENSTOCK_TRUSTED_ROOTS=str(root)))
    assert (finding.status, finding.fix) == ("broken", f"chmod o-w {root}")
    root.chmod(0o755)
    assert list(check_security(load(PENSTOCK_TRUSTED_ROOTS=str(root)))) == []


def test_an_operator_key_is_found_and_never_made(load: Load, tmp_path: Path):
    """Without a key the finding says how one is made; with a key it shows the public half for the workers."""
    file = tmp_path / "home" / "operator.pem"
    (finding,) = check_operator(load(PENSTOCK_OPERATOR_KEY_FILE=str(file)))
    assert (finding.status, "no operator's key here" in finding.what, file.exists()) == ("ok", True, False)
    key = OperatorKey.generate(file)
    (finding,) = check_operator(load(PENSTOCK_OPERATOR_KEY_FILE=str(file)))
    assert (finding.status, finding.what.endswith(key.public_text)) == ("ok", True)


def test_keys_are_named_by_their_ids(load: Load):
    """The finding about signing shows the ids of the live keys and no key."""
    secret = "A" * 43 + "="
    (finding,) = check_signing(load(PENSTOCK_SIGNING_KEYS=f"k2:{secret},k1:{secret}"))
    assert (finding.status, finding.what.endswith("live keys: k2, k1")) == ("ok", True)
    assert secret not in str(finding)
