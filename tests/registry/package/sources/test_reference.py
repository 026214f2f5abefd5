"""reference: what an operator writes after `penstock models register`, and the folder that it leads to."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package.sources.reference import is_elsewhere, package_folder
from tests.packages import write_double

COMMIT = "0123456789" * 4


@pytest.mark.parametrize("reference", ["runs:/abc/model", "models:/minilm/3", f"org/tiny@{COMMIT}", "tiny@main"])
def test_references_to_mlflow_and_the_hub_are_fetched(reference: str):
    """Runs and models of MLflow and revisions of the hub are not on this machine."""
    assert is_elsewhere(reference)


@pytest.mark.parametrize("reference", ["models/minilm/1", "/models/a@b", "./a@b", "../a@b", "minilm"])
def test_paths_are_not_fetched(reference: str):
    """A reference without @, and one that begins as a path does, is a folder of this machine."""
    assert not is_elsewhere(reference)


def test_an_existing_folder_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A folder whose name has an @ is that folder, as long as it exists."""
    monkeypatch.chdir(tmp_path)
    assert is_elsewhere("a@b")
    Path("a@b").mkdir()
    assert not is_elsewhere("a@b")


def test_a_folder_is_used_where_it_is(tmp_path: Path, models_root: Path):
    """A package on this machine is not copied into the models root."""
    folder = write_double(tmp_path / "mine")
    assert package_folder(str(folder), models_root) == folder
    assert list(models_root.glob("*")) == []


@pytest.mark.parametrize("environ", [{}, {"MLFLOW_TRACKING_URI": ""}])
def test_mlflow_needs_an_address(environ: dict[str, str], models_root: Path):
    """Without MLFLOW_TRACKING_URI the error names the variable, and MLflow's default folder is not used."""
    with pytest.raises(ConfigurationError, match=r"^MLFLOW_TRACKING_URI: missing, expected the address"):
        package_folder("models:/minilm/3", models_root, environ)


def test_a_package_of_the_hub_is_copied(models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A commit in the hub's local cache is installed in the models root."""
    snapshot = tmp_path / "hub" / "models--org--double" / "snapshots" / COMMIT
    snapshot.parent.mkdir(parents=True)
    write_double(tmp_path / "made").rename(snapshot)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = package_folder(f"org/double@{COMMIT}", models_root)
    assert folder == models_root / "double" / "1"
    assert (folder / "model.py").is_file()


def test_a_missing_commit_is_one_line(models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A commit that was not downloaded is named with the command that downloads it."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ConfigurationError, match="hf download org/tiny") as refused:
        package_folder(f"org/tiny@{COMMIT}", models_root)
    assert "\n" not in str(refused.value)
