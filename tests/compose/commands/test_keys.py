"""`penstock keys`: what goes to stdout, what is written, and what is refused; each over the real command."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from penstock.registry.data_keys import new_data_key
from penstock.safety.audit import KEY_OPERATION
from penstock.safety.audit_reader import entries
from penstock.safety.sealing import DataKeys
from penstock.workers.cache.l2 import L2Cache, L2CacheConfig
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.conftest import penstock
from tests.hsm import PIN, SoftHsm
from tests.safety.audits import files_of

KEY = "PENSTOCK_L2_ENCRYPTION_KEY"
FILE = {"PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE": "file"}


def shown_ids(home: Path, **environ: str) -> list[str]:
    """The ids of all keys, as `show` prints them for programs."""
    shown = penstock(home, "keys", "show", "--json", **environ)
    assert shown.exit_code == 0, shown.output
    return list(json.loads(shown.stdout)["keys"])


def id_of(text: str) -> str:
    """The id of a key in hex."""
    return DataKeys([bytes.fromhex(text)]).ids[0]


def test_a_key_of_the_environment_goes_to_stdout_alone(tmp_path: Path):
    """`generate` prints one line that a shell can run; stderr has the id; `show` finds that key."""
    made = penstock(tmp_path, "keys", "generate")
    assert made.exit_code == 0
    name, _, text = made.stdout.strip().removeprefix("export ").partition("=")
    assert (name, len(text)) == (KEY, 64)
    assert text not in made.stderr
    assert f"{id_of(text)}  seals and opens" in made.stderr
    assert shown_ids(tmp_path, **{name: text}) == [id_of(text)]
    again = penstock(tmp_path, "keys", "generate", **{name: text})
    assert (again.exit_code, again.stdout) == (EXIT_CONFIGURATION, "")
    assert "Expected `penstock keys rotate`" in again.stderr


def test_a_rotated_environment_has_the_new_key_first(tmp_path: Path):
    """The printed line has the new key and the old one behind it; with --last the other way round; --to moves one."""
    old = new_data_key()
    line = penstock(tmp_path, "keys", "rotate", **{KEY: old}).stdout.strip()
    new, _, kept = line.partition("=")[2].partition(",")
    assert kept == old
    line = penstock(tmp_path, "keys", "rotate", "--last", **{KEY: old}).stdout.strip()
    assert line.partition("=")[2].startswith(f"{old},")
    line = penstock(tmp_path, "keys", "rotate", "--to", id_of(old), **{KEY: f"{new},{old}"}).stdout.strip()
    assert line == f"export {KEY}={old},{new}"


def test_a_key_file_is_private_and_never_shown(tmp_path: Path):
    """`generate` and `rotate` write the file; none of the commands prints a key of it."""
    home = tmp_path / "home"
    outputs = [penstock(home, "keys", "generate", **FILE)]
    path = home / "data.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    outputs += [penstock(home, "keys", "rotate", *more, **FILE) for more in ((), ("--last",))]
    ids = shown_ids(home, **FILE)
    outputs += [penstock(home, "keys", "rotate", "--to", ids[2], **FILE), penstock(home, "keys", "show", **FILE)]
    assert [each.exit_code for each in outputs] == [0] * 5
    assert [each.stdout for each in outputs[:4]] == [""] * 4
    assert shown_ids(home, **FILE) == [ids[2], ids[0], ids[1]]
    keys = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    assert [id_of(key) for key in keys] == [ids[2], ids[0], ids[1]]
    assert not any(key in each.output for key in keys for each in outputs)
    assert f"{ids[2]}  seals and opens\n{ids[0]}  opens\n" in outputs[-1].stdout


def test_show_says_whether_a_key_is_needed(tmp_path: Path):
    """`show` names the source, and whether these settings encrypt anything."""
    environ = {KEY: new_data_key()}
    assert penstock(tmp_path, "keys", "show", **environ).stdout.startswith("source env; nothing is encrypted")
    environ["PENSTOCK_INFERENCE_PRIVACY_MODE"] = "persisted_encrypted"
    assert penstock(tmp_path, "keys", "show", **environ).stdout.startswith("source env; needed")
    assert json.loads(penstock(tmp_path, "keys", "show", "--json", **environ).stdout)["is_needed"]


def test_keys_of_an_hsm_are_wrapped_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """CF-028: `generate` makes the wrapping key when asked, the file has wrapped entries, and `rotate` adds one."""
    home = tmp_path / "home"
    environ = SoftHsm(tmp_path / "hsm").environment
    # SoftHSM reads it by itself, where the runner's environment does not reach.
    monkeypatch.setenv("SOFTHSM2_CONF", environ.pop("SOFTHSM2_CONF"))
    refused = penstock(home, "keys", "generate", **environ)
    assert refused.exit_code == EXIT_CONFIGURATION
    assert "--make-wrapping-key" in refused.stderr
    assert not (home / "data.key").exists()
    assert penstock(home, "keys", "generate", "--make-wrapping-key", **environ).exit_code == 0
    (first,) = shown_ids(home, **environ)
    assert penstock(home, "keys", "rotate", **environ).exit_code == 0
    assert shown_ids(home, **environ)[1:] == [first]
    entries = (home / "data.key").read_text().splitlines()
    assert [entry.rpartition(":")[0] for entry in entries] == ["wrapped:penstock"] * 2
    wrong = penstock(home, "keys", "show", **{**environ, "PENSTOCK_PKCS11_PIN": "wrong"})
    assert (wrong.exit_code, "refused the PIN" in wrong.stderr, PIN in wrong.output) == (
        EXIT_CONFIGURATION,
        True,
        False,
    )


def test_operations_are_in_the_audit_log(tmp_path: Path):
    """Each operation is recorded before it begins and at its end, with ids."""
    home = tmp_path / "home"
    penstock(home, "keys", "generate", **FILE)
    penstock(home, "keys", "generate", **FILE)
    (key_id,) = shown_ids(home, **FILE)
    recorded = entries([home / "audit"], 100).entries
    assert {entry.operation for entry in recorded} == {KEY_OPERATION}
    assert [(entry.details["what"], entry.result, entry.details["keys"]) for entry in recorded] == [
        ("generate", "begun", []),
        ("generate", "done", [key_id]),
        ("generate", "begun", []),
        ("generate", "failed", []),
        ("read", "done", [key_id]),
    ]


@pytest.mark.parametrize(
    "command",
    [
        "keys generate",
        "keys rotate",
        "keys rotate --to {data_key}",
        "keys show",
        "keys create shop",
        "keys rotate {api_key}",
        "keys revoke {api_key}",
        "cache verify",
    ],
)
def test_the_end_of_the_audit_log_is_stored(tmp_path: Path, command: str):
    """A deletion of the entries is found, because each command stores the end of its chain in the registry."""
    path = tmp_path / "inference_cache" / "cache.db"
    path.parent.mkdir()
    L2Cache(L2CacheConfig(db_path=path, encryption_key=bytes(32))).close()
    if command != "keys generate":
        assert penstock(tmp_path, "keys", "generate", **FILE).exit_code == 0
    made = json.loads(penstock(tmp_path, "keys", "create", "web", "--json").stdout)
    known = {file.name for file in files_of(tmp_path / "audit")}
    data_key = shown_ids(tmp_path, **FILE)[0] if "data_key" in command else ""
    words = command.format(api_key=made["id"], data_key=data_key).split()
    assert penstock(tmp_path, *words, **FILE).exit_code == 0
    for file in files_of(tmp_path / "audit"):
        if file.name not in known:
            file.unlink()
    assert penstock(tmp_path, "audit", "verify").exit_code == 1


@pytest.mark.parametrize("words", ["keys create shop", "keys generate"])
def test_a_broker_that_is_away_fails_no_change_of_a_key(tmp_path: Path, words: str):
    """The change is made, and the end of the audit log is in the registry alone."""
    away = {"PENSTOCK_REDIS_URL": f"unix://{tmp_path}/absent.sock", **FILE}
    assert penstock(tmp_path, *words.split(), **away).exit_code == 0
    (file,) = files_of(tmp_path / "audit")
    file.unlink()
    assert penstock(tmp_path, "audit", "verify").exit_code == 1


def test_misuse_is_refused_in_one_line(tmp_path: Path):
    """Nothing to rotate, an id of no key, options that exclude each other: a status that is not 0, and no key."""
    nothing = penstock(tmp_path, "keys", "rotate")
    assert (nothing.exit_code, nothing.stdout) == (EXIT_CONFIGURATION, "")
    assert nothing.stderr.startswith("Error: There is no data key: ")
    environ = {KEY: new_data_key()}
    unknown = penstock(tmp_path, "keys", "rotate", "--to", "00000000", **environ)
    assert (unknown.exit_code, unknown.stdout) == (EXIT_CONFIGURATION, "")
    assert environ[KEY] not in unknown.stderr
    assert penstock(tmp_path, "keys", "rotate", "--last", "--to", "00000000", **environ).exit_code == 2
    assert penstock(tmp_path, "keys", "generate", "--make-wrapping-key").exit_code == EXIT_CONFIGURATION
