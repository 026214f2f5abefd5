"""Addresses, file modes and keys, as the checks judge them; test_doctor.py has the whole examination."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.compose.doctor.security import (
    check_data_keys,
    check_operator,
    check_security,
    check_signing,
    check_start,
    check_transport,
)
from penstock.registry.data_keys import new_data_key
from penstock.registry.settings import Settings
from penstock.safety.operator_key import OperatorKey
from penstock.safety.sealing import DataKeys
from tests.payload_keys import DATA_KEY_TEXT

Load = Callable[..., Settings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Settings of a shell with these variables and a private home."""
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    return lambda **environ: Settings.load(environ={"PENSTOCK_HOME": str(home)} | environ, cwd=tmp_path)


KEY = {"PENSTOCK_L2_ENCRYPTION_KEY": DATA_KEY_TEXT}


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


def test_the_checks_of_a_worker_are_shown(load: Load):
    """AR-101 to AR-104: the four checks of a worker's start, as `ok`, `warning` or `broken`, each with its fix."""
    shown = list(check_start(load()))
    names = ["tenant isolation", "privacy configuration", "safety bypass resistance", "input size limits"]
    assert [finding.what.partition(":")[0] for finding in shown] == names
    assert {finding.status for finding in shown} == {"ok"}
    settings = load(
        PENSTOCK_INFERENCE_PRIVACY_CACHE_TENANT_ISOLATION="false",
        PENSTOCK_INFERENCE_PRIVACY_MODE="persisted_encrypted",
        PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_ENABLED="false",
        PENSTOCK_INFERENCE_PRIVACY_REDACT_PATTERNS="x",
        PENSTOCK_L2_ENCRYPTION_KEY="00" * 32,
    )
    shown = list(check_start(settings))
    assert [finding.status for finding in shown] == ["broken", "warning", "ok", "ok"]
    assert [bool(finding.fix) for finding in shown] == [True, True, False, False]


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


def test_data_keys_are_checked_where_they_are_needed(load: Load, tmp_path: Path):
    """Source and ids of the keys, the sealing one first, or the command that makes one; nothing where none is used."""
    mode = {"PENSTOCK_INFERENCE_PRIVACY_MODE": "persisted_encrypted"}
    keys = [new_data_key(), new_data_key()]
    assert list(check_data_keys(load())) == list(check_data_keys(load(PENSTOCK_L2_ENCRYPTION_KEY=keys[0]))) == []
    (finding,) = check_data_keys(load(**mode))
    assert (finding.status, finding.fix) == ("broken", "penstock keys generate")
    (finding,) = check_data_keys(load(**mode, PENSTOCK_L2_ENCRYPTION_KEY=",".join(keys)))
    first, second = DataKeys([bytes.fromhex(key) for key in keys]).ids
    assert finding.status == "ok"
    assert finding.what == f"data is encrypted; key source env, the key {first} seals; these open, too: {second}"


def test_a_key_file_that_others_can_read_is_broken(load: Load, tmp_path: Path):
    """Wide permissions are found, also where no setting needs the file; the fix closes it."""
    path = tmp_path / "home" / "data.key"
    path.write_text(new_data_key())
    path.chmod(0o644)
    (finding,) = check_security(load())
    assert (finding.status, finding.fix) == ("broken", f"chmod 600 {path}")
    settings = load(
        PENSTOCK_INFERENCE_CACHE_PRIVACY_MODE="persisted_encrypted",
        PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE="file",
    )
    (finding,) = check_data_keys(settings)
    assert (finding.status, "has mode -rw-r--r--" in finding.what) == ("broken", True)
    path.chmod(0o600)
    assert [each.status for each in check_data_keys(settings)] == ["ok"]
    assert [each.status for each in check_security(settings)] == ["ok"]


def test_unencrypted_data_at_rest_is_a_warning(load: Load):
    """A mode that promises encryption, with encryption off, is named."""
    off = {
        "PENSTOCK_INFERENCE_PRIVACY_ENCRYPT_AT_REST": "false",
        "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "off",
    }
    assert list(check_data_keys(load(**off))) == []
    (finding,) = check_data_keys(load(**off, PENSTOCK_INFERENCE_PRIVACY_MODE="persisted_encrypted"))
    assert (finding.status, "stores data unencrypted" in finding.what) == ("warning", True)


@pytest.mark.parametrize(
    ("variables", "statuses"),
    [
        ({}, []),
        ({"PENSTOCK_INFERENCE_PRIVACY_MODE": "hashes_only"}, ["ok", "broken"]),
        ({"PENSTOCK_INFERENCE_PRIVACY_MODE": "hashes_only", **KEY}, ["ok", "ok"]),
        ({"PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "on"}, ["ok", "broken"]),
        ({"PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "off"}, []),
        (
            {
                "PENSTOCK_INFERENCE_PRIVACY_MODE": "persisted_encrypted",
                "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "off",
            },
            ["warning", "broken"],
        ),
        (
            {
                "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS": "on",
                "PENSTOCK_INFERENCE_CELERY_LANE": "trusted",
                **KEY,
            },
            ["ok", "broken", "ok"],
        ),
    ],
)
def test_sealed_payloads_need_a_key_and_a_closed_task_endpoint(
    variables: dict[str, str], statuses: list[str], load: Load
):
    """What a worker would refuse is broken; plaintext in a private mode is a warning."""
    settings = load(**variables)
    findings = [*check_security(settings), *check_data_keys(settings)]
    assert [finding.status for finding in findings] == statuses
    assert all(finding.fix for finding in findings if finding.status != "ok")
