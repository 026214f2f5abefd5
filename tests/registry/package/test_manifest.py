"""The manifest: hashes that other programs compute too, and every change since they were computed."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from random import Random
from typing import Any
from uuid import uuid4

import pytest
import yaml

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import Package, load_package
from penstock.registry.package import manifest as manifest_module
from penstock.registry.package.manifest import FileTree, Manifest, hash_files
from tests.packages import write_double
from tests.threats.model_files import safetensors, write_encoder, write_encoder_files


@pytest.fixture
def folder(models_root: Path) -> Path:
    """A package with files in nested folders."""
    folder = write_double(models_root)
    (folder / "data" / "more").mkdir(parents=True)
    (folder / "data" / "more" / "table.csv").write_text("1,2\n")
    (folder / "data" / "big.bin").write_bytes(bytes(3_000_000))
    (folder / "Readme").write_text("")
    # Between `data` and what lies in it, where a listing of folders would not put it.
    (folder / "data.csv").write_text("3,4\n")
    return folder


def tree(folder: Path) -> FileTree:
    return FileTree(folder, "double/1", links_within=folder)


def manifest(folder: Path) -> Manifest:
    return hash_files(tree(folder))


def sha256sum(folder: Path) -> str:
    """What the program writes for all files, in the order of their names' bytes."""
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    return subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, text=True, check=True).stdout


def test_hashes_are_those_of_sha256sum(folder: Path):
    """Each file's hash, and the hash of the program's own listing of them (AR-077)."""
    listing = sha256sum(folder)
    found = manifest(folder)
    assert "".join(f"{digest}  {path}\n" for path, digest in found.files.items()) == listing
    assert found.content_hash == hashlib.sha256(listing.encode()).hexdigest()
    assert set(found.files) == {"Readme", "data.csv", "data/big.bin", "data/more/table.csv", "model.py", "model.yaml"}


def test_order_in_the_directory_does_not_matter(folder: Path, tmp_path: Path):
    """The same files, written in ten other orders, have the same hash (AR-077)."""
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    expected = manifest(folder).content_hash
    for turn in range(10):
        copy = tmp_path / f"copy{turn}"
        for path in Random(turn).sample(sorted(files), len(files)):
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            (copy / path).write_bytes(files[path])
        assert manifest(copy).content_hash == expected


def test_one_byte_or_one_name_makes_another_version(folder: Path):
    """A changed byte, a renamed, an added and a missing file: five contents, five hashes (AR-018)."""
    seen = [manifest(folder).content_hash]
    big = folder / "data" / "big.bin"
    with big.open("r+b") as opened:
        opened.seek(1_500_000)
        opened.write(b"\x01")
    seen.append(manifest(folder).content_hash)
    big.rename(folder / "data" / "b.bin")
    seen.append(manifest(folder).content_hash)
    (folder / "empty").touch()
    seen.append(manifest(folder).content_hash)
    (folder / "model.yaml").write_text("# a comment\n" + (folder / "model.yaml").read_text())
    seen.append(manifest(folder).content_hash)
    assert len(set(seen)) == 5


def test_what_python_leaves_behind_is_no_content(folder: Path):
    """Compiled modules come and go, and nothing executes them."""
    before = manifest(folder)
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "model.cpython-311.pyc").write_bytes(b"compiled")
    assert manifest(folder).content_hash == before.content_hash
    before.check_unchanged()


def _overwrite(folder: Path) -> None:
    file = folder / "model.py"
    before = file.stat()
    file.write_text(file.read_text().replace("* 2", "* 3"))
    # Size and modification time can be made to look the same.
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace(folder: Path) -> None:
    (folder / "new.py").write_bytes((folder / "model.py").read_bytes())
    (folder / "new.py").rename(folder / "model.py")


def _swap_and_back(folder: Path) -> None:
    text = (folder / "model.py").read_bytes()
    (folder / "model.py").write_bytes(b"raise SystemExit")
    (folder / "model.py").write_bytes(text)


def _link(folder: Path) -> None:
    (folder / "model.py").rename(folder / "data" / "model.py")
    (folder / "model.py").symlink_to("data/model.py")


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "overwritten, with the old size and time": (_overwrite, "file model.py: changed since it was hashed"),
    "replaced by an equal file": (_replace, "file model.py: changed since it was hashed"),
    "overwritten and restored": (_swap_and_back, "file model.py: changed since it was hashed"),
    "removed": (lambda folder: (folder / "Readme").unlink(), "file Readme: changed since it was hashed"),
    "added": (lambda folder: (folder / "late.py").touch(), "file late.py: appeared since the others were hashed"),
    "made a link": (_link, "file model.py: changed since it was hashed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_since_hashing_is_noticed(change: str, folder: Path):
    """The bytes that were hashed are the bytes that are loaded, or the file that changed is named (S0.4)."""
    act, text = CHANGES[change]
    found = manifest(folder)
    found.check_unchanged()
    act(folder)
    with pytest.raises(ConfigurationError, match=text):
        found.check_unchanged()


def test_a_write_in_the_same_tick_of_the_clock_is_noticed(folder: Path):
    """A file is hashed only once its change time lies so far back that a further write gets another one."""
    unnoticed = 0
    for turn in range(5):
        (folder / "model.py").write_text(f"a = {turn}")
        found = manifest(folder)
        (folder / "model.py").write_text(f"b = {turn}")
        try:
            found.check_unchanged()
        except ConfigurationError:
            continue
        unnoticed += 1
    assert unnoticed == 0


def test_a_file_that_changes_while_it_is_read_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """No hash of a file that is half old and half new."""
    digests = []

    def digest_and_write(file: BufferedReader, algorithm: str) -> Any:
        digests.append(digest := hashlib.file_digest(file, algorithm))
        if len(digests) == 1:
            (folder / "Readme").write_text("new")
        return digest

    monkeypatch.setattr(manifest_module, "file_digest", digest_and_write)
    assert tree(folder).hash("Readme")[0] == hashlib.sha256(b"new").hexdigest()
    assert len(digests) == 2


def test_a_file_that_never_rests_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A file that changes during each reading: the worker neither waits for ever nor uses half of it."""
    monkeypatch.setattr(manifest_module, "_QUIET_WITHIN_S", 0.2)

    def digest_and_write(file: BufferedReader, algorithm: str) -> Any:
        digest = hashlib.file_digest(file, algorithm)
        os.utime(file.name)
        return digest

    monkeypatch.setattr(manifest_module, "file_digest", digest_and_write)
    with pytest.raises(ConfigurationError, match="is being written to, expected a file at rest"):
        manifest(folder)


def test_links_stay_inside(folder: Path, tmp_path: Path):
    """A link to a file of the package is that file; one that leads out, or to a folder, is refused."""
    (folder / "again.csv").symlink_to("data/more/table.csv")
    found = manifest(folder)
    assert found.files["again.csv"] == found.files["data/more/table.csv"]
    (tmp_path / "secret").write_text("secret")
    (folder / "out").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigurationError, match=r"^double/1: file out: a link leads out, expected a file inside$"):
        manifest(folder)
    (folder / "out").unlink()
    (folder / "loop").symlink_to(".")
    with pytest.raises(ConfigurationError, match="file loop: found no regular file"):
        manifest(folder)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(os.path.relpath(path))


@pytest.mark.parametrize(
    ("name", "make"), [("fifo", os.mkfifo), ("socket", _socket), ("gone", lambda path: path.symlink_to("nothing"))]
)
def test_what_is_no_file_is_refused_before_it_is_opened(
    name: str, make: Callable[[Path], None], folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Opening a FIFO would wait for a writer; the refusal comes without one, and names the file."""
    monkeypatch.chdir(folder)
    make(folder / name)
    with pytest.raises(ConfigurationError, match=f"file {name}: found no regular file, expected one"):
        manifest(folder)


def test_a_fifo_that_takes_a_files_place_does_not_block(folder: Path):
    """Between the listing and the open anything may have happened."""
    listed = tree(folder)
    (folder / "Readme").unlink()
    os.mkfifo(folder / "Readme")
    with pytest.raises(ConfigurationError, match="file Readme: cannot be read"):
        listed.hash("Readme")


def test_names_that_break_a_line_are_refused(folder: Path):
    """The listing is one line for each file, and errors are one line."""
    (folder / "a\nb").touch()
    with pytest.raises(ConfigurationError, match="expected a name of printable characters") as refused:
        manifest(folder)
    assert "\n" not in str(refused.value)


def test_more_files_or_levels_than_any_package_has_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder that was named by mistake is not read through."""
    monkeypatch.setattr(manifest_module, "MAX_FILES", 5)
    with pytest.raises(ConfigurationError, match="found more than 5 files"):
        manifest(folder)
    monkeypatch.setattr(manifest_module, "MAX_FILES", 6)
    manifest(folder)
    folder.joinpath(*["d"] * 20).mkdir(parents=True)
    with pytest.raises(ConfigurationError, match="found folders deeper than 16"):
        manifest(folder)


def named(folder: Path) -> Package:
    """The package, its model.yaml naming the files that are there now."""
    files = {path: digest for path, digest in manifest(folder).files.items() if path != "model.yaml"}
    document = yaml.safe_load((folder / "model.yaml").read_text())
    (folder / "model.yaml").write_text(yaml.safe_dump(document | {"files": files}))
    return load_package(folder)


def _flip(folder: Path) -> None:
    with (folder / "data" / "big.bin").open("r+b") as opened:
        opened.write(b"\x01")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (_flip, r"data/big\.bin: found SHA-256 \w{12}\.\., expected \w{12}\.\. as model\.yaml says"),
        (lambda folder: (folder / "Readme").unlink(), "Readme: missing, expected the file that model.yaml names"),
        (lambda folder: (folder / "x").touch(), "x: found, expected no file that model.yaml does not name"),
    ],
    ids=["flipped", "missing", "unlisted"],
)
def test_named_files_must_be_there_unchanged_and_alone(change: Callable[[Path], None], text: str, folder: Path):
    """`files` of model.yaml names every file with its hash; the first that does not fit is named."""
    package = named(folder)
    package.manifest()
    change(folder)
    with pytest.raises(ConfigurationError, match=rf"^double/1/model\.yaml: files: {text}$"):
        package.manifest()


def test_model_yaml_that_changed_since_it_was_read_is_refused(folder: Path):
    """The spec that is served is the spec that was hashed."""
    package = load_package(folder)
    file = folder / "model.yaml"
    file.write_text(file.read_text().replace("max_batch_size: 16", "max_batch_size: 32"))
    with pytest.raises(ConfigurationError, match=r"file model\.yaml: changed since it was read"):
        package.manifest()


def test_weights_of_an_installed_package_count(models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its files are hashed as the source's: one byte there is another content, and a change is noticed."""
    installed = f"weights_{uuid4().hex}"
    weights = write_encoder_files(tmp_path / "site" / installed / "model") / "model.safetensors"
    (tmp_path / "site" / installed / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    package = load_package(write_encoder(models_root, {"package": installed, "path": "model"}))
    found = package.manifest()
    assert set(found.files) == {"model.yaml"}
    assert found.source_files == {
        "config.json": hashlib.sha256(weights.with_name("config.json").read_bytes()).hexdigest(),
        "model.safetensors": hashlib.sha256(weights.read_bytes()).hexdigest(),
    }
    weights.write_bytes(safetensors({"w": ("F32", [2], bytes([1]) * 8)}))
    with pytest.raises(ConfigurationError, match=r"^encoder/1: source: file model\.safetensors: changed since"):
        found.check_unchanged()
    assert package.manifest().content_hash != found.content_hash
