"""Packages under a models root: which is active at the start, and the cost of a name that jobs send."""

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


def active_at_start(root: Path, *models: str, model_version: str = "latest") -> dict[str, str]:
    """The active label of each model at the start of a worker with these settings."""
    overrides = {"repo_root": str(root), "model_version": model_version, "worker": {"models": models}}
    packages = DiskRepository(root, [root]).initial_packages(Settings.load(overrides=overrides, environ={}, cwd=root))
    return {package.spec.name: package.spec.version for package in packages}


class CountingRepository:
    """A repository that counts the packages that it reads, with a clock that the test sets."""

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
        """The error for this package."""
        with pytest.raises((ConfigurationError, UnknownModel)) as refused:
            self._repository.package(name, label)
        return str(refused.value)

    def version(self, name: str, label: str) -> str:
        """The label of the package that is found."""
        return self._repository.package(name, label).spec.version


def test_highest_version_is_active(models_root: Path):
    """It holds for every model, or for those that the settings name; a version in the settings replaces the highest."""
    write(models_root, "one", "1", "2", "10")
    write(models_root, "two", "1", "2")
    assert active_at_start(models_root) == {"one": "10", "two": "2"}
    assert active_at_start(models_root, "two") == {"two": "2"}
    assert active_at_start(models_root, model_version="1") == {"one": "1", "two": "1"}


def test_a_version_that_is_not_valid_is_passed_over(models_root: Path, caplog: pytest.LogCaptureFixture):
    """An unfinished copy and a folder without its code: the next lower version is active, and the log says why."""
    write(models_root, "one", "1", "2")
    half_copied(models_root, "one", "3")
    (write_package(models_root, "one", SOURCE, version="4") / "model.py").unlink()
    write(models_root, "two", "1")
    assert active_at_start(models_root) == {"one": "2", "two": "1"}
    assert active_at_start(models_root, "one") == {"one": "2"}
    assert [record.getMessage() for record in caplog.records][:2] == [
        "version skipped: one/4/model.yaml: entrypoint: found 'model:build', expected a module inside the package",
        "version skipped: one/3/model.yaml, line 1: not valid YAML",
    ]


def test_a_model_without_a_valid_version_is_left_out_unless_it_is_named(
    models_root: Path, caplog: pytest.LogCaptureFixture
):
    """A bad folder does not affect other models; if the settings name it, the start fails."""
    half_copied(models_root, "bad", "1")
    write(models_root, "good", "1")
    for name, line in (("odd", "policy: !!bool x"), ("empty", "generate: ''")):
        with (write_package(models_root, name, SOURCE) / "model.yaml").open("a") as file:
            file.write(f"{line}\n")
    assert active_at_start(models_root) == {"good": "1"}
    assert "model not served: odd/1/model.yaml: not valid YAML" in caplog.messages
    assert any("empty/1/model.yaml: generate: found" in message for message in caplog.messages)
    assert "model not served: bad/1/model.yaml, line 1: not valid YAML" in caplog.messages
    with pytest.raises(ConfigurationError, match=r"^bad/1/model\.yaml, line 1: not valid YAML$"):
        active_at_start(models_root, "good", "bad")


def test_links_that_cannot_be_followed_affect_no_other_model(models_root: Path, caplog: pytest.LogCaptureFixture):
    """A link whose target has too long a name, in the place of a model, of a version and of a model.yaml."""
    write(models_root, "good", "1")
    (models_root / "bad" / "1").mkdir(parents=True)
    for link in ("model", "bad/2", "bad/1/model.yaml"):
        (models_root / link).symlink_to("x" * 300)
    assert active_at_start(models_root) == {"good": "1"}
    assert "model not served: bad/2/model.yaml: cannot be read (File name too long)" in caplog.messages


def test_without_a_valid_model_the_first_problem_is_raised(models_root: Path):
    """The error of a worker without a valid package is that of the highest version."""
    (write_package(models_root, "bad", SOURCE, version="2") / "model.py").unlink()
    half_copied(models_root, "bad", "1")
    half_copied(models_root, "worse", "1")
    with pytest.raises(ConfigurationError, match=r"^bad/2/model\.yaml: entrypoint: "):
        active_at_start(models_root)


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
def test_models_and_versions_in_the_settings_must_exist(
    models_root: Path, models: tuple[str, ...], model_version: str, text: str
):
    """No other version is served in their place."""
    write(models_root, "one", "1")
    half_copied(models_root, "one", "2")
    with pytest.raises(ConfigurationError) as refused:
        active_at_start(models_root, *models, model_version=model_version)
    assert str(refused.value) == text


def test_folders_that_are_no_packages_are_ignored(models_root: Path):
    """A models root may also hold invalid names, hidden folders, circular links and plain files."""
    write(models_root, "one", "1")
    for name in ("[a]", ".cache", "My Model"):
        half_copied(models_root, name, "1")
    (models_root / "circle").symlink_to("circle")
    (models_root / "one" / "2").symlink_to("2")
    (models_root / "README.md").write_text("one model\n")
    assert active_at_start(models_root) == {"one": "1"}
    assert DiskRepository(models_root, [models_root]).labels("one") == ["1"]
    with pytest.raises(ConfigurationError, match=r"^Under the models root: Bad model name 'My Model'\. "):
        active_at_start(models_root, model_version="1")


def test_unknown_versions_are_refused_without_a_search(models_root: Path, monkeypatch: pytest.MonkeyPatch):
    """A flood of unknown labels reads no package and lists no folder; a version that is added is found at once."""
    write(models_root, "one", "1")
    counting = CountingRepository(models_root, monkeypatch)

    def listed(*_: object) -> None:
        pytest.fail("a folder was listed")

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", listed)
        patched.setattr(os, "listdir", listed)
        for number in range(2, 50):
            expected = f"Unknown model 'one/{number}'. Expected a version under the models root"
            assert counting.refusal("one", str(number)) == expected
    assert counting.reads == 0
    write(models_root, "one", "2")
    assert counting.version("one", "2") == "2"


def test_broken_packages_are_not_read_for_every_job(models_root: Path, monkeypatch: pytest.MonkeyPatch):
    """The error is repeated until model.yaml changes, or two seconds have passed: other files may have changed."""
    counting = CountingRepository(models_root, monkeypatch)
    file = half_copied(models_root, "one", "1")
    for _ in range(10):
        assert counting.refusal("one", "1") == "one/1/model.yaml, line 1: not valid YAML"
    assert counting.reads == 1
    file.write_text("name: one\nversion: [")
    assert counting.refusal("one", "1") == "one/1/model.yaml, line 2: not valid YAML"
    assert counting.reads == 2

    folder = write_package(models_root, "one", SOURCE, version="2")
    (folder / "model.py").unlink()
    for _ in range(10):
        assert counting.refusal("one", "2").startswith("one/2/model.yaml: entrypoint: ")
    assert counting.reads == 3
    (folder / "model.py").write_text(SOURCE)
    counting.now = 1.9
    assert counting.refusal("one", "2").startswith("one/2/model.yaml: entrypoint: ")
    counting.now = 2.0
    assert counting.version("one", "2") == "2"


def test_remembered_errors_of_broken_packages_are_bounded(models_root: Path, monkeypatch: pytest.MonkeyPatch):
    """Beyond the bound all are forgotten, and a package is read again when a job names it."""
    monkeypatch.setattr("penstock.workers.versions.repository._MOST_REMEMBERED", 3)
    counting = CountingRepository(models_root, monkeypatch)
    for label in "1234":
        half_copied(models_root, "one", label)
        counting.refusal("one", label)
    assert counting.reads == 4
    counting.refusal("one", "4")
    assert counting.reads == 4
    counting.refusal("one", "1")
    assert counting.reads == 5


@pytest.mark.parametrize(("name", "label"), [("../secret", "1"), ("one", ".."), ("one", "../../etc"), ("one", "")])
def test_names_never_lead_out_of_the_models_root(tmp_path: Path, models_root: Path, name: str, label: str):
    """The name in a job is checked before it becomes a path."""
    write(models_root, "one", "1")
    write(tmp_path, "secret", "1")
    with pytest.raises(InvalidInput, match=r"^Bad (model|version) name"):
        DiskRepository(models_root, [tmp_path]).package(name, label)


def test_circular_links_are_errors_of_one_line(models_root: Path):
    """A version, a spec and an entry point may be links to themselves."""
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


def test_a_missing_models_root_has_no_versions(models_root: Path, caplog: pytest.LogCaptureFixture):
    """An unmounted disk ends no worker: loaded versions stay active."""
    repository = DiskRepository(models_root / "mount", [models_root])
    assert repository.labels("one") == []
    assert caplog.messages == [
        "versions not found: Models root 'mount' is not a folder. Expected <name>/<version>/model.yaml in it"
    ]
    with pytest.raises(UnknownModel):
        repository.package("one", "1")


def test_code_outside_the_trusted_roots_is_not_loaded(models_root: Path, tmp_path: Path):
    """PENSTOCK_TRUSTED_ROOTS: a worker loads code from there only; without it, from its models root."""
    write(models_root, "one", "1")

    def package(trusted: Path | None) -> Package:
        environ = {"PENSTOCK_INFERENCE_REPO_ROOT": str(models_root)}
        if trusted is not None:
            environ["PENSTOCK_TRUSTED_ROOTS"] = str(trusted)
        return DiskRepository.of(Settings.load(environ=environ, cwd=tmp_path)).package("one", "1")

    for trusted in (None, models_root, models_root / "one"):
        assert package(trusted).spec.name == "one"
    with pytest.raises(ConfigurationError, match="trusted"):
        package(tmp_path / "elsewhere")


def test_without_a_models_root_no_version_is_found():
    """A worker that was started with its packages finds no other versions."""
    assert EmptyRepository().labels("one") == []
    with pytest.raises(UnknownModel, match=r"^Unknown model 'one/1'"):
        EmptyRepository().package("one", "1")


def test_no_input_is_longer_than_the_setting_allows(models_root: Path):
    """`safeguards.input_validation.max_sequence_length` bounds a package's own limit; without it, or with the check
    off, only the package's limit holds (CX-022)."""
    for name, length in (("open", {}), ("long", {"max_length": 2048}), ("short", {"max_length": 16})):
        file = write_package(models_root, name, SOURCE) / "model.yaml"
        spec = yaml.safe_load(file.read_text())
        spec["inputs"][0]["shape"] = ["batch", "length"]
        spec["outputs"][0]["shape"] = ["batch", "length"]
        file.write_text(yaml.safe_dump(spec | {"batching": {"length_input": "x", **length}}))

    def longest(name: str, **validation: object) -> int:
        """The longest of the tried inputs that is accepted."""
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
