"""Sources of model files: one conformance suite over a folder, the hub's cache and MLflow, then what each adds."""

from __future__ import annotations

import hashlib
import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol
from uuid import uuid4

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import load_package
from penstock.registry.package.hub_cache import find_snapshot
from penstock.registry.package.sources import HubSource, LocalSource, MlflowSource, ModelSource
from tests.packages import write_double
from tests.threats.model_files import write_encoder, write_encoder_files

COMMIT = "0123456789" * 4
MLFLOW_WARNINGS = (
    "ignore:The ``noload`` loader strategy",
    # Connections of the store's pool live as long as the process.
    "ignore:unclosed database:ResourceWarning",
)


class Origin(Protocol):
    """A source under test, and a way to put files into it."""

    source: ModelSource
    unknown: str

    def put(self, folder: Path) -> str:
        """Makes the files of a folder available; returns their reference."""


class LocalOrigin:
    """Folders."""

    unknown = "absent/1"

    def __init__(self, root: Path) -> None:
        self.source: ModelSource = LocalSource(root)
        self._root = root

    def put(self, folder: Path) -> str:
        reference = f"{folder.parent.name}/{folder.name}"
        shutil.copytree(folder, self._root / reference, symlinks=True)
        return reference


class HubOrigin:
    """A cache as the hub's tools lay it out: files are links to blobs."""

    unknown = f"org/absent@{COMMIT}"

    def __init__(self, root: Path) -> None:
        self.source: ModelSource = HubSource(root)
        self._repository = root / "models--org--tiny"

    def put(self, folder: Path) -> str:
        snapshot = self._repository / "snapshots" / COMMIT
        (self._repository / "blobs").mkdir(parents=True)
        for file in (path for path in folder.rglob("*") if path.is_symlink() or path.is_file()):
            link = snapshot / file.relative_to(folder)
            link.parent.mkdir(parents=True, exist_ok=True)
            if file.is_symlink():
                link.symlink_to(file.readlink())
                continue
            blob = self._repository / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
            shutil.copy(file, blob)
            link.symlink_to(os.path.relpath(blob, link.parent))
        return f"org/tiny@{COMMIT}"


class MlflowOrigin:
    """Artefacts of a run, in a store on this machine."""

    unknown = "models:/absent/1"

    def __init__(self, store: str, root: Path) -> None:
        from mlflow.tracking import MlflowClient

        self.source: ModelSource = MlflowSource(store, root / "models")
        self.client = MlflowClient(store, store)
        self._experiment = self.client.create_experiment(uuid4().hex, (root / "artefacts").as_uri())

    def put(self, folder: Path) -> str:
        run = self.client.create_run(self._experiment).info.run_id
        self.client.log_artifacts(run, str(folder), "package")
        return f"runs:/{run}/package"


@pytest.fixture(scope="module")
def mlflow_store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store in SQLite, made once: its tables take seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
        yield f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'store.db'}"


@pytest.fixture(params=["local", "hub", pytest.param("mlflow", marks=pytest.mark.slow)])
def origin(request: pytest.FixtureRequest, tmp_path: Path) -> Origin:
    """Each source in turn."""
    root = tmp_path / "origin"
    root.mkdir()
    if request.param == "local":
        return LocalOrigin(root)
    if request.param == "hub":
        return HubOrigin(root)
    return MlflowOrigin(request.getfixturevalue("mlflow_store"), root)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package with its weights."""
    folder = write_encoder(tmp_path / "written", {"path": "."})
    return write_encoder_files(folder)


@pytest.mark.filterwarnings(*MLFLOW_WARNINGS)
class TestEverySource:
    """What holds wherever files come from (AR-017)."""

    def test_files_arrive_unchanged(self, origin: Origin, package: Path):
        """Each file, under its name, with its bytes (AR-077 to AR-079)."""
        expected = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in package.iterdir()}
        fetched = origin.source.fetch(origin.put(package))
        assert fetched.manifest.files == expected
        assert {path.name for path in fetched.folder.iterdir()} == set(expected)
        fetched.manifest.check_unchanged()

    def test_fetching_twice_gives_the_same_content(self, origin: Origin, package: Path):
        """The second time everything is there already."""
        reference = origin.put(package)
        first, second = origin.source.fetch(reference), origin.source.fetch(reference)
        assert first.manifest.content_hash == second.manifest.content_hash
        assert first.folder == second.folder
        first.manifest.check_unchanged()

    def test_a_later_change_is_noticed(self, origin: Origin, package: Path):
        """What was fetched is what is loaded."""
        fetched = origin.source.fetch(origin.put(package))
        with (fetched.folder / "config.json").open("a") as opened:
            opened.write(" ")
        with pytest.raises(ConfigurationError, match=r"file config\.json: changed since it was hashed"):
            fetched.manifest.check_unchanged()

    def test_what_is_not_there_is_named(self, origin: Origin, tmp_path: Path):
        """One line, without a path of the machine (CX-013)."""
        with pytest.raises(ConfigurationError) as refused:
            origin.source.fetch(origin.unknown)
        assert ("absent" in str(refused.value)) or ("1: no such folder" in str(refused.value))
        assert str(tmp_path) not in str(refused.value)
        assert "\n" not in str(refused.value)

    @pytest.mark.parametrize("reference", ["", "..", "../../etc", "/etc", "a@b@c", "runs:/../../etc/x", "models:/x"])
    def test_references_that_are_none_are_refused(self, origin: Origin, reference: str):
        """Whatever a reference looks like, it leads to files of the source or is refused."""
        with pytest.raises(ConfigurationError):
            origin.source.fetch(reference)

    def test_pickled_weights_are_refused(self, origin: Origin, package: Path):
        """The line says why."""
        (package / "model.safetensors").unlink()
        (package / "pytorch_model.bin").write_bytes(pickle.dumps({}))
        with pytest.raises(ConfigurationError, match=r"pytorch_model\.bin.* pickle.* can run code"):
            origin.source.fetch(origin.put(package))

    def test_code_that_comes_with_weights_is_refused(self, origin: Origin, package: Path):
        """Nothing asks whether to trust it."""
        (package / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
        with pytest.raises(ConfigurationError, match="found auto_map"):
            origin.source.fetch(origin.put(package))


@pytest.mark.parametrize("make", [LocalOrigin, HubOrigin])
def test_links_to_elsewhere_are_refused(make: Callable[[Path], Origin], package: Path, tmp_path: Path):
    """A package's own links stay inside it, and those of the hub's cache inside the repository."""
    (tmp_path / "secret.json").write_text("{}")
    (package / "extra.json").symlink_to(tmp_path / "secret.json")
    origin = make(tmp_path / "origin")
    with pytest.raises(ConfigurationError, match=r"file extra\.json: a link leads out"):
        origin.source.fetch(origin.put(package))


def test_folder_without_a_package_is_refused(tmp_path: Path):
    """A folder that is there but holds something else."""
    (tmp_path / "some" / "1").mkdir(parents=True)
    with pytest.raises(ConfigurationError, match=r"^some/1/model\.yaml: cannot be read"):
        LocalSource(tmp_path).fetch("some/1")


@pytest.mark.parametrize("revision", ["main", "v1.0", COMMIT[:12], COMMIT.upper() + "A", ""])
def test_only_commits_of_the_hub_are_taken(revision: str, tmp_path: Path):
    """A branch or a tag is another model tomorrow (AR-078)."""
    with pytest.raises(ConfigurationError, match="expected a commit of 40 hex digits"):
        HubSource(tmp_path).fetch(f"org/tiny@{revision}")


def test_package_may_take_its_weights_from_the_hubs_cache(
    models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`source: {hub, revision}` finds the snapshot, counts its files, and says when it is not there (AR-078)."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    package = load_package(write_encoder(models_root, {"hub": "org/tiny", "revision": COMMIT}))
    with pytest.raises(ConfigurationError, match=r"^org/tiny@012345678901 is not in the local cache of the hub"):
        package.manifest()
    HubOrigin(tmp_path / "hub").put(write_encoder_files(tmp_path / "weights"))
    assert set(package.manifest().source_files) == {"config.json", "model.safetensors"}
    assert package.source_folder() == find_snapshot("org/tiny", COMMIT).folder.resolve()


@pytest.fixture
def mlflow_shelf(mlflow_store: str, tmp_path: Path) -> MlflowOrigin:
    """MLflow alone."""
    return MlflowOrigin(mlflow_store, tmp_path)


@pytest.mark.filterwarnings(*MLFLOW_WARNINGS)
class TestMlflow:
    """What MLflow adds (AR-079)."""

    def test_a_registered_model_is_fetched_into_the_models_root(self, mlflow_shelf: MlflowOrigin, tmp_path: Path):
        """`models:/name/version` leads to the run's artefacts, and the package is found as any other."""
        reference = mlflow_shelf.put(write_double(tmp_path / "written"))
        name = f"double-{tmp_path.name}"
        mlflow_shelf.client.create_registered_model(name)
        registered = mlflow_shelf.client.create_model_version(name, reference, reference.split("/")[1])
        fetched = mlflow_shelf.source.fetch(f"models:/{name}/{registered.version}")
        assert fetched.folder == tmp_path / "models" / "double" / "1"
        assert load_package(fetched.folder).manifest().content_hash == fetched.manifest.content_hash
        assert [path.name for path in (tmp_path / "models").iterdir()] == ["double"]

    def test_another_content_of_the_same_version_is_refused(self, mlflow_shelf: MlflowOrigin, tmp_path: Path):
        """What is served under a version is never replaced behind its back."""
        written = write_double(tmp_path / "written")
        mlflow_shelf.source.fetch(mlflow_shelf.put(written))
        served = (tmp_path / "models" / "double" / "1" / "model.py").read_bytes()
        (written / "model.py").write_text("def build(): return None\n")
        with pytest.raises(ConfigurationError, match="double/1 is installed with other content"):
            mlflow_shelf.source.fetch(mlflow_shelf.put(written))
        assert (tmp_path / "models" / "double" / "1" / "model.py").read_bytes() == served

    def test_a_model_of_a_flavour_is_refused_with_the_reason(self, mlflow_shelf: MlflowOrigin, tmp_path: Path):
        """What mlflow.pytorch.log_model writes is a pickle; nothing of it is left in the models root."""
        flavour = tmp_path / "flavour"
        (flavour / "data").mkdir(parents=True)
        (flavour / "MLmodel").write_text("flavors:\n  pytorch: {model_data: data}\n")
        (flavour / "data" / "model.pth").write_bytes(pickle.dumps({}))
        with pytest.raises(ConfigurationError, match=r"file data/model\.pth: found a pickle, which can run code"):
            mlflow_shelf.source.fetch(mlflow_shelf.put(flavour))
        assert list((tmp_path / "models").iterdir()) == []

    @pytest.mark.usefixtures("mlflow_store")
    def test_an_address_that_mlflow_does_not_know_is_one_line(self, tmp_path: Path):
        """The error names the reference, and MLflow's code for it."""
        source = MlflowSource("ftp://store", tmp_path / "models")
        with pytest.raises(ConfigurationError, match=r"^runs:/1/model: MLflow answers [A-Z_]+, expected files$"):
            source.fetch("runs:/1/model")

    def test_artefacts_without_a_package_are_refused(self, mlflow_shelf: MlflowOrigin, tmp_path: Path):
        """The line says what is missing."""
        (tmp_path / "plots").mkdir()
        (tmp_path / "plots" / "loss.csv").write_text("1\n")
        with pytest.raises(ConfigurationError, match=r"found no model\.yaml, expected the folder of a model package"):
            mlflow_shelf.source.fetch(mlflow_shelf.put(tmp_path / "plots"))
