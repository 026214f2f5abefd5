"""install: a fetched package becomes `<models root>/<name>/<version>`, and is never changed afterwards."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import discover
from penstock.registry.package.sources.base import Fetched
from penstock.registry.package.sources.install import download_folder, install
from tests.packages import write_double

Put = Callable[..., Fetched]


@pytest.fixture
def put(models_root: Path) -> Put:
    """Installs a package `double/1`; `change` is called with its folder before."""

    def put(change: Callable[[Path], object] = lambda _: None) -> Fetched:
        with download_folder(models_root) as temporary:
            package = write_double(temporary / "download")
            change(package)
            return install(package, models_root, temporary, "org/double@0123")

    return put


def files_of(root: Path) -> dict[str, bytes]:
    """The files below a folder."""
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


def test_a_package_is_installed_under_its_name_and_version(put: Put, models_root: Path):
    """The folder follows model.yaml, the hashes are those of the files, and nothing else is left behind."""
    fetched = put()
    assert fetched.folder == models_root / "double" / "1"
    assert fetched.manifest.files.keys() == {"model.yaml", "model.py"}
    assert set(files_of(models_root)) == {"double/1/model.yaml", "double/1/model.py"}
    assert [path.name for path in models_root.iterdir()] == ["double"]


def test_installing_again_changes_nothing(put: Put, models_root: Path):
    """The same content under the same version is confirmed."""
    first, before = put(), files_of(models_root)
    assert put() == first
    assert files_of(models_root) == before


def test_other_content_under_a_version_is_refused(put: Put, models_root: Path):
    """The installed files stay, and the error asks for another version."""
    put()
    before = files_of(models_root)
    with pytest.raises(ConfigurationError, match=r"^org/double@0123: double/1 is installed with other content"):
        put(lambda package: (package / "model.py").write_text("def build(): ..."))
    assert files_of(models_root) == before


def test_another_version_lies_beside_the_first(put: Put, models_root: Path):
    """A second version of a model has a folder of its own."""

    def number_2(package: Path) -> None:
        spec = package / "model.yaml"
        spec.write_text(spec.read_text().replace("version: '1'", "version: '2'"))

    put()
    assert put(number_2).folder == models_root / "double" / "2"
    assert {found.version for found in discover(models_root)} == {"1", "2"}


def test_a_folder_without_a_model_yaml_is_refused(put: Put, models_root: Path):
    """Weights alone are no package."""
    with pytest.raises(ConfigurationError, match=r"^org/double@0123: found no model\.yaml"):
        put(lambda package: (package / "model.yaml").unlink())
    assert files_of(models_root) == {}


@pytest.mark.parametrize("name", ["weights.pkl", "weights.bin", "nested/checkpoint.ckpt"])
def test_pickles_are_refused(name: str, put: Put, models_root: Path):
    """A file that can run code is refused anywhere in a package, and nothing is installed."""

    def add(package: Path) -> None:
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_bytes(pickle.dumps({}))

    with pytest.raises(ConfigurationError, match=f"file {name}: found a pickle, which can run code"):
        put(add)
    assert files_of(models_root) == {}


@pytest.mark.parametrize("file", ["", "double", "double/1"])
def test_a_file_in_the_place_of_a_folder_is_one_line(file: str, put: Put, models_root: Path):
    """The error has the reason of the system and no path; nothing of the download is left."""
    place = models_root / file
    if place.is_dir():
        place.rmdir()
    place.parent.mkdir(exist_ok=True)
    place.write_text("a file")
    with pytest.raises(
        ConfigurationError, match=r"^Models root 'models': a package cannot be written there \("
    ) as told:
        put()
    assert str(models_root.parent) not in str(told.value)
    assert files_of(models_root.parent) == {place.relative_to(models_root.parent).as_posix(): b"a file"}


def test_a_download_is_invisible_and_short_lived(models_root: Path):
    """Workers find no package in the folder of a download, which is removed also after an error."""
    with pytest.raises(RuntimeError), download_folder(models_root) as temporary:  # noqa: PT012 - what the block does before the error is the subject
        write_double(temporary / "download")
        assert temporary.parent == models_root
        assert list(discover(models_root)) == []
        raise RuntimeError("the connection broke")
    assert list(models_root.iterdir()) == []
