"""Where the data keys come from: environment, file or HSM; rotation; and no plaintext where a key is missing."""

from __future__ import annotations

import base64
import os
import secrets
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path

import pytest

from penstock.registry.data_keys import new_data_key
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings import Settings
from penstock.safety.audit import KEY_OPERATION, AuditConfig, AuditLogger
from penstock.safety.keys import (
    generate_keys,
    key_audit,
    load_data_keys,
    needs_data_keys,
    promote_key,
    read_data_keys,
    rotate_keys,
)
from penstock.safety.sealing import DataKeys
from tests.hsm import SoftHsm
from tests.servers import ROOT

Load = Callable[..., Settings]
MODE = "PENSTOCK_INFERENCE_PRIVACY_MODE"
CACHE_MODE = "PENSTOCK_INFERENCE_CACHE_PRIVACY_MODE"
SOURCE = "PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_SOURCE"
FILE = "PENSTOCK_INFERENCE_PRIVACY_ENCRYPTION_KEY_FILE"
KEY = "PENSTOCK_L2_ENCRYPTION_KEY"
SEALS = "PENSTOCK_INFERENCE_PRIVACY_SEAL_PAYLOADS"
AT_REST = "PENSTOCK_INFERENCE_PRIVACY_ENCRYPT_AT_REST"
MODES = ("ephemeral", "hashes_only", "persisted_encrypted")


class Records(list[tuple[str, str, Mapping[str, object]]]):
    """An audit that keeps its records."""

    def __call__(self, operation: str, result: str, details: Mapping[str, object]) -> None:
        self.append((operation, result, details))

    @property
    def told(self) -> list[tuple[str, str]]:
        """Operations with their results."""
        return [(operation, result) for operation, result, _ in self]


@pytest.fixture
def audit() -> Records:
    """What was recorded."""
    return Records()


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Settings of a process in the mode persisted_encrypted with these variables, and a home of its own."""
    base = {"PENSTOCK_HOME": str(tmp_path / "home"), MODE: "persisted_encrypted"}
    return lambda **environ: Settings.load(environ=base | environ, cwd=tmp_path)


@pytest.fixture
def hsm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The settings for a token of this test. SoftHSM reads its configuration from the environment."""
    environment = SoftHsm(tmp_path / "hsm").environment
    monkeypatch.setenv("SOFTHSM2_CONF", environment.pop("SOFTHSM2_CONF"))
    return environment


@pytest.fixture(params=["env", "file", "hsm"])
def source(request: pytest.FixtureRequest) -> dict[str, str]:
    """The settings of each source."""
    if request.param == "hsm":
        return dict(request.getfixturevalue("hsm"))
    return {SOURCE: request.param}


def refusal(settings: Settings) -> str:
    """The error of a load, which is one line."""
    with pytest.raises(ConfigurationError) as refused:
        load_data_keys(settings)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def write(path: Path, text: str, mode: int = 0o600) -> Path:
    """A file of keys."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def following(load: Load, source: Mapping[str, str], line: str) -> Settings:
    """The settings after a change: with the line that it printed, if any."""
    assert line.startswith(f"export {KEY}=") or not line
    return load(**source, **({KEY: line.partition("=")[2]} if line else {}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache_mode", MODES)
@pytest.mark.parametrize("at_rest", ["true", "false"])
@pytest.mark.parametrize("seals", ["auto", "off"])
def test_a_key_is_needed_where_data_is_encrypted(mode: str, cache_mode: str, at_rest: str, seals: str, load: Load):
    """For data at rest in persisted_encrypted, unless hashes_only is stricter, and for sealed payloads in both modes;
    each has its own way out.
    """
    chosen = {MODE: mode, CACHE_MODE: cache_mode, AT_REST: at_rest, SEALS: seals}
    settings = load(**chosen)
    modes = {mode, cache_mode}
    is_stored = "persisted_encrypted" in modes and "hashes_only" not in modes
    is_needed = (is_stored and at_rest == "true") or (seals == "auto" and modes != {"ephemeral"})
    assert needs_data_keys(settings) is is_needed
    if is_needed:
        assert "There is no data key" in refusal(settings)
    else:
        assert load_data_keys(settings) is None
        assert load_data_keys(load(**chosen, **{SOURCE: "hsm"})) is None


def test_every_source_opens_the_same_row(load: Load, tmp_path: Path):
    """CF-028, CF-045: one key as hex and base64 in the environment and in a file opens what the others sealed."""
    key = secrets.token_bytes(32)
    texts = (key.hex(), base64.b64encode(key).decode())
    files = [write(tmp_path / f"{place}.key", f"# ours\n\n{text}  # now\n") for place, text in enumerate(texts)]
    found = [load(**{KEY: text}) for text in texts] + [load(**{SOURCE: "file", FILE: str(file)}) for file in files]
    keys = [loaded for settings in found if (loaded := load_data_keys(settings))]
    sealed = keys[0].seal(b"row", b"place")
    assert [each.open(sealed, b"place") for each in keys] == [b"row"] * 4


def test_the_first_key_of_a_source_seals(load: Load, tmp_path: Path):
    """Keys are in the order of the variable, or of the lines of the file."""
    texts = [new_data_key() for _ in range(3)]
    expected = DataKeys([bytes.fromhex(text) for text in texts]).ids
    file = write(tmp_path / "data.key", "\n# comment\n" + "\n".join(texts))
    assert read_data_keys(load(**{KEY: ",".join(texts)})).ids == expected
    assert read_data_keys(load(**{SOURCE: "file", FILE: str(file)})).ids == expected


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644, 0o666])
def test_a_file_that_others_can_open_is_refused(mode: int, load: Load, tmp_path: Path):
    """CF-028: the key file must have mode 0600; the error shows neither key nor folder."""
    text = new_data_key()
    settings = load(**{SOURCE: "file"})
    write(settings.inference.privacy.encryption_key_file, text, mode)
    message = refusal(settings)
    assert "data.key has mode" in message
    assert "(mode 0600)" in message
    assert text not in message
    assert str(tmp_path) not in message
    settings.inference.privacy.encryption_key_file.chmod(0o600)
    assert load_data_keys(settings) is not None


def test_unusable_files_are_refused(load: Load, tmp_path: Path):
    """Short keys, other text, no text, a FIFO, a folder, no file: one line each that names the file or the key."""
    secret = new_data_key()
    texts = {"short": secret[:-2], "text": "hunter2", "late": f"{secret}\n{secret}x", "bytes": "\udcff" * 32}
    paths = [tmp_path / name for name in (*texts, "empty", "comment", "fifo", "folder", "missing")]
    for name, text in {**texts, "empty": "", "comment": "# nothing\n"}.items():
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
        (tmp_path / name).chmod(0o600)
    os.mkfifo(tmp_path / "fifo", 0o600)
    (tmp_path / "folder").mkdir(mode=0o700)
    for path in paths:
        message = refusal(load(**{SOURCE: "file", FILE: str(path)}))
        assert path.name in message or "Data key" in message
        assert "Expected" in message
        assert ("has mode" in message) == (path.name in ("fifo", "folder"))
        assert secret[:-2] not in message
        assert str(tmp_path) not in message


def test_wrapped_keys_need_the_hsm(load: Load, tmp_path: Path):
    """The entries of an HSM under the source file, and keys that are not wrapped under hsm, are refused as such."""
    wrapped = write(tmp_path / "wrapped.key", f"wrapped:penstock:{base64.b64encode(bytes(40)).decode()}\n")
    assert f"Expected {SOURCE}=hsm" in refusal(load(**{SOURCE: "file", FILE: str(wrapped)}))


def test_home_moves_the_key_file(load: Load, tmp_path: Path):
    """Without a setting of its own the file is data.key in the home."""
    assert load().inference.privacy.encryption_key_file == tmp_path / "home" / "data.key"


def test_generated_keys_are_read_back(source: dict[str, str], load: Load, audit: Records):
    """Each source makes its first key; the process reads the same id, and no second `generate` replaces the key."""
    options = {"makes_wrapping_key": True} if source[SOURCE] == "hsm" else {}
    made = generate_keys(load(**source), audit, **options)
    settings = following(load, source, made.line)
    found = load_data_keys(settings)
    assert found is not None
    assert (found.ids, len(made.ids)) == (made.ids, 1)
    with pytest.raises(ConfigurationError, match="Expected `penstock keys rotate`"):
        generate_keys(settings, audit)
    assert read_data_keys(settings).ids == made.ids
    assert audit.told == [("generate", "begun"), ("generate", "done"), ("generate", "begun"), ("generate", "failed")]
    assert audit[1][2] == {"source": source[SOURCE], "keys": [*made.ids]}


def test_rotation_keeps_what_was_sealed(source: dict[str, str], load: Load, audit: Records):
    """A new key comes first and seals; what the old one sealed opens, and is known as not current."""
    options = {"makes_wrapping_key": True} if source[SOURCE] == "hsm" else {}
    settings = following(load, source, generate_keys(load(**source), audit, **options).line)
    old = read_data_keys(settings)
    sealed = old.seal(b"value", b"place")
    change = rotate_keys(settings, audit)
    found = read_data_keys(following(load, source, change.line))
    assert change.ids == found.ids
    assert found.ids[1:] == old.ids
    assert found.open(sealed, b"place") == b"value"
    assert not found.is_current(sealed)
    assert audit.told[-2:] == [("rotate", "begun"), ("rotate", "done")]


def test_a_key_can_be_put_last_and_promoted(source: dict[str, str], load: Load, audit: Records):
    """With is_last a new key only opens, until it is promoted: machines that share data learn it before it seals."""
    options = {"makes_wrapping_key": True} if source[SOURCE] == "hsm" else {}
    settings = following(load, source, generate_keys(load(**source), audit, **options).line)
    (first,) = read_data_keys(settings).ids
    settings = following(load, source, rotate_keys(settings, audit, is_last=True).line)
    old, new = read_data_keys(settings).ids
    assert old == first
    settings = following(load, source, promote_key(settings, audit, new).line)
    assert read_data_keys(settings).ids == (new, old)
    with pytest.raises(ConfigurationError, match=f"Expected one of: {new}, {old}"):
        promote_key(settings, audit, "00000000")
    assert read_data_keys(settings).ids == (new, old)


def test_changes_keep_comments_and_mode(load: Load, audit: Records):
    """Comments of the operator stay where they were; each new line says its id; the file is private and alone."""
    settings = load(**{SOURCE: "file"})
    path = settings.inference.privacy.encryption_key_file
    write(path, f"# keys of the north site\n{new_data_key()}  # from 2025\n# the end\n")
    ids = rotate_keys(settings, audit).ids
    lines = path.read_text().splitlines()
    assert [line.partition("#")[2].strip() for line in lines] == [
        "keys of the north site",
        ids[0],
        "from 2025",
        "the end",
    ]
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]


def test_rotations_at_once_lose_no_key(load: Load, audit: Records):
    """Of eight commands that rotate one file at the same time, each finds its key in the file afterwards."""
    settings = load(**{SOURCE: "file"})
    generate_keys(settings, audit)
    start = threading.Barrier(8)
    made: list[str] = []

    def rotate() -> None:
        start.wait(180)
        made.append(rotate_keys(settings, audit).ids[0])

    threads = [threading.Thread(target=rotate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    ids = read_data_keys(settings).ids
    assert len(ids) == 9
    assert set(made) == set(ids[:8])


def test_a_change_that_cannot_be_recorded_is_not_made(load: Load):
    """The record comes first: without it no key is made or moved."""

    def refuse(_operation: str, _result: str, _details: Mapping[str, object]) -> None:
        raise ConfigurationError("The audit log cannot be written")

    settings = load(**{SOURCE: "file"})
    with pytest.raises(ConfigurationError, match="audit log"):
        generate_keys(settings, refuse)
    assert not settings.inference.privacy.encryption_key_file.exists()


def test_unwritable_places_are_refused(load: Load, audit: Records, tmp_path: Path):
    """A file in the place of the folder is an error in one line, and the record says failed."""
    (tmp_path / "taken").write_text("")
    settings = load(**{SOURCE: "file", FILE: str(tmp_path / "taken" / "data.key")})
    with pytest.raises(ConfigurationError, match=r"data\.key cannot be written"):
        generate_keys(settings, audit)
    assert audit.told == [("generate", "begun"), ("generate", "failed")]


def test_only_an_hsm_has_a_wrapping_key(load: Load, audit: Records):
    """makes_wrapping_key with another source is refused before anything is made."""
    with pytest.raises(ConfigurationError, match="Only an HSM has a wrapping key"):
        generate_keys(load(), audit, makes_wrapping_key=True)
    assert audit == []


def test_no_wrapping_key_is_made_for_a_file_that_exists(hsm: dict[str, str], load: Load, audit: Records):
    """A `generate` that is refused because there are keys leaves the token as it was."""
    generate_keys(load(**hsm), audit, makes_wrapping_key=True)
    settings = load(**hsm, PENSTOCK_INFERENCE_PRIVACY_PKCS11_KEY="another")
    with pytest.raises(ConfigurationError, match="exists already"):
        generate_keys(settings, audit, makes_wrapping_key=True)
    with pytest.raises(ConfigurationError, match="no AES key 'another'"):
        rotate_keys(settings, audit)


@pytest.mark.parametrize("label", ["", "two words", "a:b", "a#b"])
def test_labels_that_the_key_file_cannot_hold_are_refused(label: str, load: Load):
    """The label of a wrapping key is one word in the key file; an empty variable is an unset one."""
    environ = {"PENSTOCK_INFERENCE_PRIVACY_PKCS11_KEY": label}
    if not label:
        assert load(**environ).inference.privacy.pkcs11_key == "penstock"
        return
    with pytest.raises(ConfigurationError, match="expected the label of a key"):
        load(**environ)


def test_the_audit_log_names_ids_and_no_key(load: Load):
    """Loads and their failures are lines of the audit log, with source and ids; switched off, there is none."""
    text = new_data_key()
    settings = load(**{KEY: text})
    with closing(AuditLogger(config=AuditConfig.of(settings))) as log:
        loaded = load_data_keys(settings, key_audit(log))
        assert loaded is not None
        with pytest.raises(ConfigurationError):
            load_data_keys(load(), key_audit(log))
        done, failed = log.get_entries_since(0)
    assert (done.operation, done.result, failed.result) == (KEY_OPERATION, "done", "failed")
    assert done.details == {"what": "read", "source": "env", "keys": [*loaded.ids]}
    assert failed.details == {"what": "read", "source": "env", "keys": []}
    folder = settings.inference.privacy.audit_log_path
    (file,) = folder.glob("*.jsonl")
    assert text not in file.read_text()
    file.unlink()
    silent = load(**{KEY: text, "PENSTOCK_INFERENCE_PRIVACY_AUDIT_LOG_ENABLED": "false"})
    with closing(AuditLogger(config=AuditConfig.of(silent))) as log:
        assert load_data_keys(silent, key_audit(log)) is not None
    assert [*folder.glob("*.jsonl")] == []


def test_an_audit_log_that_is_lost_stops_a_change(load: Load):
    """A log that cannot be written any more is a clear error."""
    settings = load(**{SOURCE: "file"})
    log = AuditLogger(config=AuditConfig.of(settings))
    record = key_audit(log)
    log.close()
    folder = settings.inference.privacy.audit_log_path
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    with pytest.raises(ConfigurationError, match="The audit log cannot be written"):
        generate_keys(settings, record)


def test_without_the_library_nothing_is_stored_in_the_clear(tmp_path: Path):
    """CF-046: with cryptography missing, persisted_encrypted is refused with the extra's name; opted out, it is not."""
    program = (
        "import sys; sys.modules['cryptography'] = None\n"
        "from penstock.registry.errors import ConfigurationError\n"
        "from penstock.registry.settings import Settings\n"
        "from penstock.safety.keys import load_data_keys\n"
        "try:\n    print(load_data_keys(Settings.load()))\n"
        "except ConfigurationError as error:\n    print(error)\n"
    )
    environment = {"PATH": os.environ["PATH"], "PENSTOCK_HOME": str(tmp_path), MODE: "persisted_encrypted"}
    environment |= {"PYTHONPATH": str(ROOT), KEY: new_data_key()}

    def printed(**further: str) -> str:
        command = [sys.executable, "-c", program]
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment | further, capture_output=True, text=True, check=True
        )
        return ran.stdout.strip()

    assert printed().endswith("Expected: pip install '.[cli]' in the checkout of Penstock")
    assert printed(**{AT_REST: "false", SEALS: "off"}) == "None"
