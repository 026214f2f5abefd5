"""Packages under a models root: which answers at the start, and what a name that jobs send costs."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import yaml

from penstock.registry.errors import ConfigurationError, InvalidInput, UnknownModel
from penstock.registry.package import Package
from penstock.registry.settings import Settings
from penstock.workers.versions.repository import DiskRepository, EmptyRepository
from tests.packages import write_package

SOURCE = "def build():\n    return lambda inputs: {'y': inputs['x']}\n"


def write(root: Path, name: str, *versions: str) -> None:
    for version in versions:
        write_package(root, name, SOURCE, version=version)


def half_copied(root: Path, name: str, version: str) -> Path:
    """A package whose model.yaml ends in the middle; returns that file."""
    file = write_package(root, name, SOURCE, version=version) / "model.yaml"
    file.write_text("name: [")
    return file


def answering(root: Path, *models: str, model_version: str = "latest") -> dict[str, str]:
    """The label that answers, by model, at the start of a worker with these settings."""
    overrides = {"repo_root": str(root), "model_version": model_version, "worker": {"models": models}}
    packages = DiskRepository(root, [root]).initial_packages(Settings.load(overrides=overrides, environ={}, cwd=root))
    return {package.spec.name: package.spec.version for package in packages}


class Looks:
    """The models root, with the packages that were read counted, under a clock that stands still."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.reads = 0
        self._repository = DiskRepository(root, [root], clock=lambda: self.now)
        read = self._repository._read

        def counted(folder: Path) -> Package:
            self.reads += 1
            return read(folder)

        monkeypatch.setattr(self._repository, "_read", counted)

    def refusal(self, name: str, label: str) -> str:
        """Why a package is not to be had."""
        with pytest.raises((ConfigurationError, UnknownModel)) as refused:
            self._repository.package(name, label)
        return str(refused.value)

    def version(self, name: str, label: str) -> str:
        """The label of a package that is to be had."""
        return self._repository.package(name, label).spec.version


def test_highest_version_answers(models_root: Path):
    """Of every model, or of those that the settings name; a version that they name answers in place of the highest."""
    write(models_root, "one", "1", "2", "10")
    write(models_root, "two", "1", "2")
    assert answering(models_root) == {"one": "10", "two": "2"}
    assert answering(models_root, "two") == {"two": "2"}
    assert answering(models_root, model_version="1") == {"one": "1", "two": "1"}


def test_a_version_that_is_not_valid_is_passed_over(models_root: Path, caplog: pytest.LogCaptureFixture):
    """A copy that is under way, a folder without its weights: the next lower one answers, and the log says why."""
    write(models_root, "one", "1", "2")
    half_copied(models_root, "one", "3")
    (write_package(models_root, "one", SOURCE, version="4") / "model.py").unlink()
    write(models_root, "two", "1")
    assert answering(models_root) == {"one": "2", "two": "1"}
    assert answering(models_root, "one") == {"one": "2"}
    assert [record.getMessage() for record in caplog.records][:2] == [
        "version passed over: one/4/model.yaml: entrypoint: found 'model:build', expected a module inside the package",
        "version passed over: one/3/model.yaml, line 1: not valid YAML",
    ]


def test_a_model_without_a_valid_version_is_left_out_unless_it_is_named(
    models_root: Path, caplog: pytest.LogCaptureFixture
):
    """One bad folder keeps no other model from being served; who asked for it by name is told."""
    half_copied(models_root, "bad", "1")
    write(models_root, "good", "1")
    assert answering(models_root) == {"good": "1"}
    assert "model not served: bad/1/model.yaml, line 1: not valid YAML" in caplog.messages
    with pytest.raises(ConfigurationError, match=r"^bad/1/model\.yaml, line 1: not valid YAML$"):
        answering(models_root, "good", "bad")


def test_nothing_to_serve_is_the_first_problem(models_root: Path):
    """A worker over one broken package says what is wrong with its highest version."""
    (write_package(models_root, "bad", SOURCE, version="2") / "model.py").unlink()
    half_copied(models_root, "bad", "1")
    half_copied(models_root, "worse", "1")
    with pytest.raises(ConfigurationError, match=r"^bad/2/model\.yaml: entrypoint: "):
        answering(models_root)


@pytest.mark.parametrize(
    ("models", "model_version", "text"),
    [
        (("absent",), "latest", "Unknown model 'absent'. It has no package. Expected a package under the models root"),
        (
            ("one",),
            "3",
            "Unknown model 'one/3'. Expected version: 1, 2. Expected a package under the models root",
        ),
        ((), "2", "one/2/model.yaml, line 1: not valid YAML"),
    ],
    ids=["model", "version", "pinned version that is broken"],
)
def test_what_the_settings_name_has_to_be_there(
    models_root: Path, models: tuple[str, ...], model_version: str, text: str
):
    """Nothing else is served in its place."""
    write(models_root, "one", "1")
    half_copied(models_root, "one", "2")
    with pytest.raises(ConfigurationError) as refused:
        answering(models_root, *models, model_version=model_version)
    assert str(refused.value) == text


def test_folders_that_are_no_packages_do_not_matter(models_root: Path):
    """Whatever else lies under a models root: names that are none, links in a circle, plain files."""
    write(models_root, "one", "1")
    for name in ("[a]", ".cache", "My Model"):
        half_copied(models_root, name, "1")
    (models_root / "circle").symlink_to("circle")
    (models_root / "one" / "2").symlink_to("2")
    (models_root / "README.md").write_text("one model\n")
    assert answering(models_root) == {"one": "1"}
    assert DiskRepository(models_root, [models_root]).labels("one") == ["1"]
    with pytest.raises(ConfigurationError, match=r"^Under the models root: Bad model name '\.cache'\. "):
        answering(models_root, model_version="1")


def test_unknown_versions_are_refused_without_a_search(models_root: Path, monkeypatch: pytest.MonkeyPatch):
    """A flood of labels that are nowhere reads no package and lists no folder; one that comes is there at once."""
    write(models_root, "one", "1")
    looks = Looks(models_root, monkeypatch)

    def listed(*_: object) -> None:
        pytest.fail("a folder was listed")

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", listed)
        patched.setattr(os, "listdir", listed)
        for number in range(2, 50):
            expected = f"Unknown model 'one/{number}'. Expected a version under the models root"
            assert looks.refusal("one", str(number)) == expected
    assert looks.reads == 0
    write(models_root, "one", "2")
    assert looks.version("one", "2") == "2"


def test_broken_packages_are_not_read_for_every_job(models_root: Path, monkeypatch: pytest.MonkeyPatch):
    """The refusal is repeated until model.yaml is another, or two seconds have passed: other files may have come."""
    looks = Looks(models_root, monkeypatch)
    file = half_copied(models_root, "one", "1")
    for _ in range(10):
        assert looks.refusal("one", "1") == "one/1/model.yaml, line 1: not valid YAML"
    assert looks.reads == 1
    file.write_text("name: one\nversion: [")
    assert looks.refusal("one", "1") == "one/1/model.yaml, line 2: not valid YAML"
    assert looks.reads == 2

    folder = write_package(models_root, "one", SOURCE, version="2")
    (folder / "model.py").unlink()
    for _ in range(10):
        assert looks.refusal("one", "2").startswith("one/2/model.yaml: entrypoint: ")
    assert looks.reads == 3
    (folder / "model.py").write_text(SOURCE)
    looks.now = 1.9
    assert looks.refusal("one", "2").startswith("one/2/model.yaml: entrypoint: ")
    looks.now = 2.0
    assert looks.version("one", "2") == "2"


def test_what_is_remembered_of_broken_packages_is_bounded(models_root: Path, monkeypatch: pytest.MonkeyPatch):
    """Past the bound all is forgotten, and read again when a job names it."""
    monkeypatch.setattr("penstock.workers.versions.repository._MOST_REMEMBERED", 3)
    looks = Looks(models_root, monkeypatch)
    for label in "1234":
        half_copied(models_root, "one", label)
        looks.refusal("one", label)
    assert looks.reads == 4
    looks.refusal("one", "4")
    assert looks.reads == 4
    looks.refusal("one", "1")
    assert looks.reads == 5


@pytest.mark.parametrize(("name", "label"), [("../secret", "1"), ("one", ".."), ("one", "../../etc"), ("one", "")])
def test_names_never_lead_out_of_the_models_root(tmp_path: Path, models_root: Path, name: str, label: str):
    """What a job names is a name before it is a path."""
    write(models_root, "one", "1")
    write(tmp_path, "secret", "1")
    with pytest.raises(InvalidInput, match=r"^Bad (model|version) name"):
        DiskRepository(models_root, [tmp_path]).package(name, label)


def test_links_in_a_circle_are_one_line(models_root: Path):
    """A version, a spec and an entry point that lead to themselves, for whoever names them."""
    repository = DiskRepository(models_root, [models_root])
    write(models_root, "one", "1", "2", "3")
    for label, file in (("2", "model.yaml"), ("3", "model.py")):
        (models_root / "one" / label / file).unlink()
        (models_root / "one" / label / file).symlink_to(file)
    (models_root / "one" / "4").symlink_to("4")
    for label in "234":
        with pytest.raises(ConfigurationError, match=rf"^one/{label}/model\.yaml: ") as refused:
            repository.package("one", label)
        assert str(models_root) not in str(refused.value)
    assert repository.package("one", "1").spec.version == "1"


def test_a_models_root_that_went_away_has_no_versions(models_root: Path, caplog: pytest.LogCaptureFixture):
    """An unmounted disk ends no worker: what is loaded goes on answering."""
    repository = DiskRepository(models_root / "mount", [models_root])
    assert repository.labels("one") == []
    assert caplog.messages == [
        "versions not found: Models root 'mount' is not a folder. Expected <name>/<version>/model.yaml in it"
    ]
    with pytest.raises(UnknownModel):
        repository.package("one", "1")


def test_without_a_models_root_there_is_nothing():
    """A worker that was given its packages finds no others."""
    assert EmptyRepository().labels("one") == []
    with pytest.raises(UnknownModel, match=r"^Unknown model 'one/1'"):
        EmptyRepository().package("one", "1")


def test_no_input_is_longer_than_the_setting_allows(models_root: Path):
    """`safeguards.input_validation.max_sequence_length` is what a worker's packages are limited to, however long theirs
    may be: at 512, 513 are refused; at 0, and with the check off, a package's own limit holds (CX-022)."""
    for name, length in (("open", {}), ("long", {"max_length": 2048}), ("short", {"max_length": 16})):
        file = write_package(models_root, name, SOURCE) / "model.yaml"
        spec = yaml.safe_load(file.read_text())
        spec["inputs"][0]["shape"] = ["batch", "length"]
        spec["outputs"][0]["shape"] = ["batch", "length"]
        file.write_text(yaml.safe_dump(spec | {"batching": {"length_input": "x", **length}}))

    def longest(name: str, **validation: object) -> int:
        """The longest input that is accepted."""
        overrides = {"repo_root": str(models_root), "safeguards": {"input_validation": validation}}
        settings = Settings.load(overrides=overrides, environ={}, cwd=models_root)
        signature = DiskRepository.of(settings).package(name, "1").spec.signature
        for length in (4096, 2048, 513, 512, 128, 16):
            with suppress(InvalidInput):
                signature.check({"x": np.zeros((1, length), np.float32)})
                return length
        return 0

    names = ("open", "long", "short")
    assert [longest(name, max_sequence_length=512) for name in names] == [512, 512, 16]
    assert [longest(name, max_sequence_length=128) for name in names] == [128, 128, 16]
    for without in ({}, {"enabled": False, "max_sequence_length": 512}):
        assert [longest(name, **without) for name in names] == [4096, 2048, 16]
