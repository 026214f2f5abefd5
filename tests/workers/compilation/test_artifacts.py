"""Stored artefacts: used only if this machine's key sealed every byte of them."""

from __future__ import annotations

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.workers.compilation.artifacts import ArtifactStore

PARTS = {"library": bytes(range(256)) * 40, "findings": b'{"graphs": 1}', "constants": b""}


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """A store whose key lies outside of it."""
    return ArtifactStore(tmp_path / "home" / "cache", tmp_path / "home" / "compilation.key")


def artifact(tmp_path: Path, name: str) -> Path:
    return tmp_path / "home" / "cache" / f"{name}.artifact"


def test_stored_parts_come_back(tmp_path: Path, store: ArtifactStore):
    """AR-040: another process with the same key finds what was stored."""
    store.store("one", PARTS)
    again = ArtifactStore(tmp_path / "home" / "cache", tmp_path / "home" / "compilation.key")
    assert again.load("one") == PARTS
    assert again.load("two") is None
    assert again.refused == 0


def test_folder_and_key_are_private(tmp_path: Path, store: ArtifactStore):
    """CF-014: the folder has mode 0700, the key and the artefacts 0600."""
    store.store("one", PARTS)
    modes = [
        stat.S_IMODE(path.stat().st_mode)
        for path in (tmp_path / "home" / "cache", tmp_path / "home" / "compilation.key", artifact(tmp_path, "one"))
    ]
    assert modes == [0o700, 0o600, 0o600]


def test_open_folder_is_closed(tmp_path: Path):
    """CF-014: a folder that others could enter is made private."""
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o755)
    ArtifactStore(folder, tmp_path / "key")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("position", [0, 63, 64, 70, 5_000, -1])
def test_changed_byte_is_refused(tmp_path: Path, store: ArtifactStore, position: int):
    """AR-040: in the seal, the header or a part; the file is moved aside and counted, and never used again."""
    store.store("one", PARTS)
    path = artifact(tmp_path, "one")
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
    assert store.load("one") is None
    assert store.refused == 1
    assert not path.exists()
    assert path.with_suffix(".refused").read_bytes() == bytes(data)
    assert store.load("one") is None
    assert store.refused == 1


@pytest.mark.parametrize("change", [lambda data: data[:-1], lambda data: data + b"x", lambda data: b""])
def test_other_length_is_refused(tmp_path: Path, store: ArtifactStore, change):
    """AR-040: a file that was cut short or appended to is refused."""
    store.store("one", PARTS)
    path = artifact(tmp_path, "one")
    path.write_bytes(change(path.read_bytes()))
    assert store.load("one") is None
    assert store.refused == 1


def test_artefact_under_another_name_is_refused(tmp_path: Path, store: ArtifactStore):
    """AR-040: a sealed artefact of one model cannot be put in the place of another's."""
    store.store("one", PARTS)
    artifact(tmp_path, "one").rename(artifact(tmp_path, "two"))
    assert store.load("two") is None
    assert store.refused == 1


def test_artefact_of_another_key_is_refused(tmp_path: Path, store: ArtifactStore):
    """AR-040: an artefact with the seal of another key is not used."""
    ArtifactStore(tmp_path / "home" / "cache", tmp_path / "other.key").store("one", PARTS)
    assert store.load("one") is None
    assert store.refused == 1


def test_refused_artefact_is_replaced_by_a_new_one(tmp_path: Path, store: ArtifactStore):
    """A new artefact replaces it."""
    artifact(tmp_path, "one").write_bytes(b"not ours")
    assert store.load("one") is None
    store.store("one", PARTS)
    assert store.load("one") == PARTS


def test_key_that_others_can_read_is_refused(tmp_path: Path, store: ArtifactStore):
    """Every user who can read the key can seal, so the key must be private."""
    (tmp_path / "home" / "compilation.key").chmod(0o640)
    with pytest.raises(ConfigurationError, match=r"has mode 640\. Expected 600"):
        ArtifactStore(tmp_path / "home" / "cache", tmp_path / "home" / "compilation.key")


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 33])
def test_key_of_another_length_is_refused(tmp_path: Path, content: bytes):
    """An empty file is not a key."""
    key = tmp_path / "key"
    key.write_bytes(content)
    key.chmod(0o600)
    with pytest.raises(ConfigurationError, match="is not 32 bytes long"):
        ArtifactStore(tmp_path / "cache", key)


def test_key_that_is_a_link_is_refused(tmp_path: Path, store: ArtifactStore):
    """A link may lead to a file that another user can write."""
    (tmp_path / "link").symlink_to(tmp_path / "home" / "compilation.key")
    with pytest.raises(ConfigurationError, match=r"cannot be used \(a link\)"):
        ArtifactStore(tmp_path / "cache", tmp_path / "link")


def test_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    """CF-014: found out when the worker starts, in one line."""
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ConfigurationError, match=r"^compilation\.cache_dir cannot be used"):
        ArtifactStore(tmp_path / "file" / "cache", tmp_path / "key")


def test_workers_that_start_at_once_share_one_key(tmp_path: Path):
    """Of several that make the key, one wins, and the others use its key."""
    start = threading.Barrier(8)
    stores: list[ArtifactStore] = []

    def begin() -> None:
        start.wait()
        stores.append(ArtifactStore(tmp_path / "cache", tmp_path / "compilation.key"))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, one in enumerate(stores):
        one.store(str(number), PARTS)
    assert [stores[0].load(str(number)) for number in range(8)] == [PARTS] * 8
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "compilation.key"]


def test_least_recently_used_artefacts_make_room(tmp_path: Path):
    """The folder stays bounded, and artefacts in use stay in it."""
    store = ArtifactStore(tmp_path / "cache", tmp_path / "key", most_bytes=30_000)
    for number, name in enumerate(("old", "used", "newer")):
        if name == "newer":
            assert store.load("used") is not None
            os.utime(tmp_path / "cache" / "old.artifact", ns=(1, 1))
        store.store(name, {"library": bytes(12_000)})
        assert number < 2 or store.load("old") is None
    assert store.load("used") is not None
    assert store.load("newer") is not None


def test_full_disk_only_costs_the_artefact(tmp_path: Path, store: ArtifactStore, caplog: pytest.LogCaptureFixture):
    """A folder that vanished or cannot be written to is no reason to refuse a compiled model."""
    (tmp_path / "home" / "cache").rmdir()
    store.store("one", PARTS)
    assert store.load("one") is None
    assert "cannot be stored" in caplog.text


def test_discarded_artefact_is_gone(store: ArtifactStore):
    """An artefact that does not work here is removed, and does not count as changed."""
    store.store("one", PARTS)
    store.discard("one")
    store.discard("one")
    assert store.load("one") is None
    assert store.refused == 0


def test_folder_that_cannot_be_written_to_is_still_read(store: ArtifactStore, monkeypatch: pytest.MonkeyPatch):
    """AR-040: an image that brings the artefacts along, mounted read-only, has them used; the rest is let be."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    store.store("one", PARTS)
    for name in ("utime", "unlink", "replace", "mkdir"):
        monkeypatch.setattr(os, name, refuse)
    assert store.load("one") == PARTS
    store.discard("one")
    store.store("two", PARTS)
    assert store.load("one") == PARTS
    assert store.load("two") is None


def test_of_workers_that_need_the_same_one_makes_it(tmp_path: Path, store: ArtifactStore):
    """AR-040: a second worker that starts meanwhile waits, and finds what the first one has made; no lock is left."""
    other = ArtifactStore(tmp_path / "home" / "cache", tmp_path / "home" / "compilation.key")
    waits, looks, found = threading.Event(), [], []

    def waits_on() -> bool:
        looks.append(1)
        if len(looks) > 1:
            # The first look comes before the first try.
            waits.set()
        return False

    def look() -> None:
        with other.alone("one", waits_on):
            found.append(other.load("one"))
        waits.set()

    with store.alone("one", lambda: False):
        thread = threading.Thread(target=look)
        thread.start()
        assert waits.wait(180)
        store.store("one", PARTS)
    thread.join(60)
    assert found == [PARTS]
    assert [path.name for path in (tmp_path / "home" / "cache").iterdir()] == ["one.artifact"]


def test_waiting_for_another_worker_can_be_given_up(tmp_path: Path, store: ArtifactStore):
    """A worker that stops does not wait for the lock, and no worker waits where no file can be locked."""
    other = ArtifactStore(tmp_path / "home" / "cache", tmp_path / "home" / "compilation.key")
    with store.alone("one", lambda: False), other.alone("one", lambda: True), other.alone("two", lambda: False):
        pass
    (tmp_path / "home" / "cache" / "three.lock").symlink_to(tmp_path / "elsewhere")
    with other.alone("three", lambda: False):
        assert not (tmp_path / "elsewhere").exists()
