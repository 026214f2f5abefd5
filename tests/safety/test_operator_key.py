"""The operator's key: made once, private to its owner; signatures of other keys are refused."""

from __future__ import annotations

import base64
import hashlib
import os
import stat
import threading
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from penstock.registry.errors import ConfigurationError
from penstock.safety.operator_key import OperatorKey, PublicKeys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file that is not there, in a folder that is not there."""
    return tmp_path / "home" / "operator.pem"


def test_key_survives_in_its_file(path: Path):
    """What a generated key signed, the public half of the loaded one verifies; the file is its owner's only."""
    made = OperatorKey.generate(path)
    loaded = OperatorKey.load(path)
    assert loaded.public_text == made.public_text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == [path.name]
    key_id, signature = made.sign(b"message")
    keys = PublicKeys.parse(loaded.public_text)
    assert keys.verify(b"message", key_id, signature)
    assert not keys.verify(b"massage", key_id, signature)
    assert not keys.verify(b"message", key_id, signature[:-1])


def test_key_id_is_the_hash_of_the_public_key(path: Path):
    """The id follows from the public half."""
    key_id, _, encoded = OperatorKey.generate(path).public_text.partition(":")
    assert key_id == hashlib.sha256(base64.b64decode(encoded)).hexdigest()[:8]


def test_existing_key_is_not_overwritten(path: Path):
    """A second generate is refused and leaves the first key as it is."""
    first = OperatorKey.generate(path)
    with pytest.raises(ConfigurationError, match=r"operator\.pem exists already"):
        OperatorKey.generate(path)
    assert OperatorKey.load(path).key_id == first.key_id
    assert os.listdir(path.parent) == [path.name]


def test_one_of_many_generators_wins(path: Path):
    """However many make a key at once, one file is made and the others are told."""
    made: list[str] = []
    told: list[str] = []
    start = threading.Barrier(8)

    def generate() -> None:
        start.wait(180)
        try:
            made.append(OperatorKey.generate(path).key_id)
        except ConfigurationError as error:
            told.append(str(error))

    threads = [threading.Thread(target=generate) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [OperatorKey.load(path).key_id]
    assert len(told) == 7


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_key_that_others_can_read_is_refused(path: Path, mode: int):
    """A key that other users can read is refused; the error shows no key and no folder."""
    OperatorKey.generate(path)
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match="mode 0600") as refused:
        OperatorKey.load(path)
    assert str(path.parent) not in str(refused.value)


def test_what_is_no_key_is_refused(path: Path):
    """Text, another algorithm, a password, a FIFO, a folder, nothing at all: one line each, and no hang."""
    key = generate_private_key(SECP256R1())
    ours = path.with_name("ours.pem")
    OperatorKey.generate(ours)
    texts = {
        "empty.pem": b"",
        "text.pem": b"-----BEGIN PRIVATE KEY-----\nnonsense\n-----END PRIVATE KEY-----\n",
        "ec.pem": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "locked.pem": key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"password")),
    }
    for name, text in texts.items():
        file = path.with_name(name)
        file.write_bytes(text)
        file.chmod(0o600)
    os.mkfifo(path.with_name("fifo.pem"), 0o600)
    path.with_name("folder.pem").mkdir()
    for name in (*texts, "fifo.pem", "folder.pem", "missing.pem"):
        with pytest.raises(ConfigurationError) as refused:
            OperatorKey.load(path.with_name(name))
        assert name in str(refused.value)
        assert "\n" not in str(refused.value)
        assert str(path.parent) not in str(refused.value)


def test_public_keys_of_several_operators(path: Path):
    """Each is known by its own id; a signature does not count under another's id."""
    first, second = (OperatorKey.generate(path.with_name(name)) for name in ("a.pem", "b.pem"))
    keys = PublicKeys.parse(f"{first.public_text}, {second.public_text},")
    assert len(keys) == 2
    assert all(keys.verify(b"m", *key.sign(b"m")) for key in (first, second))
    assert not keys.verify(b"m", second.key_id, first.sign(b"m")[1])
    assert not PublicKeys.parse("").verify(b"m", *first.sign(b"m"))


@pytest.mark.parametrize("text", ["nonsense", "id:", "12345678:AAAA", "{}x", "00000000{}", ",:,"])
def test_unusable_public_keys_are_refused(text: str, path: Path):
    """The error says which one, and shows none of them."""
    known = OperatorKey.generate(path).public_text
    broken = text.format(known[8:] if "00000000" in text else known)
    with pytest.raises(ConfigurationError, match="public key 1 is not usable") as refused:
        PublicKeys.parse(broken)
    assert known not in str(refused.value)
