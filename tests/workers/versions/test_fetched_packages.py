"""Models from the cache of the Hugging Face hub and from MLflow, from their source to their answers."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package import load_package
from penstock.registry.package.sources import is_elsewhere, package_folder
from penstock.registry.settings import Settings
from penstock.workers.versions.repository import DiskRepository
from tests.registry.package.test_sources import COMMIT, MLFLOW_WARNINGS, HubOrigin
from tests.servers import require_module
from tests.workers.runtime import formats

TEXT = np.array(["a pipe", "b"], object)


def test_weights_in_the_hubs_cache_answer_as_they_do_beside_their_package(
    models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`source: {hub, revision}`: transformers loads the pinned commit from the cache as the hub's tools lay it out,
    offline, tokenizer and all; the vectors are those of the same files in a folder (AR-078)."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    beside = formats.write_encoder(models_root)
    hub, _, revision = HubOrigin(tmp_path / "hub").put(beside / "weights").partition("@")
    fetched = formats.write(
        models_root,
        "fetched",
        {
            "format": "transformers",
            "source": {"hub": hub, "revision": revision},
            "inputs": load_package(beside).spec.model_dump()["inputs"],
            "outputs": [{"name": "embedding", "dtype": "float32", "shape": ["batch", 16]}],
        },
    )
    runtimes = [formats.opened(folder) for folder in (beside, fetched)]
    expected, found = (formats.answers(runtime, text=TEXT)["embedding"] for runtime in runtimes)
    np.testing.assert_array_equal(found, expected)
    assert runtimes[1].content_hash == load_package(fetched).manifest().content_hash
    for runtime in runtimes:
        runtime.close()


def test_a_package_on_the_hub_is_fetched_and_answers(
    models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """`organisation/name@commit` with a model.yaml in it: a copy in the models root, where a worker finds it, with the
    content that was uploaded; the second time nothing changes (AR-017)."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    uploaded = formats.write_torchscript(tmp_path / "uploaded")
    reference = HubOrigin(tmp_path / "hub").put(uploaded)
    folder = package_folder(reference, models_root)
    assert folder == package_folder(reference, models_root) == models_root / "affine" / "1"
    assert not any(path.is_symlink() for path in folder.iterdir())
    settings = Settings.load(overrides={"repo_root": str(models_root)}, environ={}, cwd=models_root)
    package = DiskRepository.of(settings).package("affine", "1")
    assert package.manifest().content_hash == load_package(uploaded).manifest().content_hash
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(formats.answers(formats.opened(folder), x=x)["y"], formats.affine(x), rtol=1e-5)


@pytest.mark.filterwarnings(*MLFLOW_WARNINGS, "ignore:The filesystem tracking backend:FutureWarning")
def test_a_package_in_mlflow_is_fetched_and_answers(models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """`runs:/...` and `models:/...` at MLFLOW_TRACKING_URI, here a store of files: what a run logged is served, and
    answers as the module did (AR-017, AR-079)."""
    tracking = require_module("mlflow.tracking")
    uri = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    for name, value in (("DISABLE_TELEMETRY", "true"), ("ENABLE_ARTIFACTS_PROGRESS_BAR", "false")):
        monkeypatch.setenv(f"MLFLOW_{name}", value)
    # A database takes seconds to make.
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = tracking.MlflowClient(uri, uri)
    run = client.create_run(client.create_experiment("trained")).info.run_id
    client.log_artifacts(run, str(formats.write_pytorch(tmp_path / "trained")), "package")
    client.create_registered_model("affine-registered")
    version = client.create_model_version("affine-registered", f"runs:/{run}/package", run).version
    folder = package_folder(f"runs:/{run}/package", models_root)
    assert folder == package_folder(f"models:/affine-registered/{version}", models_root) == models_root / "affine" / "1"
    x = np.ones((2, 4), np.float32)
    np.testing.assert_allclose(formats.answers(formats.opened(folder), x=x)["y"], formats.affine(x), rtol=1e-5)


def _weights(hub: Path, tmp_path: Path) -> str:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text("{}")
    return HubOrigin(hub).put(tmp_path / "weights")


def _pickled(hub: Path, tmp_path: Path) -> str:
    folder = formats.write_python(tmp_path / "written")
    (folder / "weights.bin").write_bytes(b"\x80")
    return HubOrigin(hub).put(folder)


def _changed(hub: Path, tmp_path: Path) -> str:
    folder = formats.write_python(tmp_path / "written")
    reference = HubOrigin(hub).put(folder)
    package_folder(reference, tmp_path / "models")
    shutil.rmtree(hub)
    (folder / "model.py").write_text("def build(): ...\n")
    return HubOrigin(hub).put(folder)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (_weights, f"found no model.yaml, .* with source: {{hub: org/tiny, revision: {COMMIT}}}"),
        (_pickled, r"file weights\.bin: found a pickle, which can run code"),
        (_changed, "affine/1 is installed with other content, expected another version"),
        (lambda *_: f"org/absent@{COMMIT}", "org/absent@012345678901 is not in the local cache of the hub"),
        (lambda *_: "org/tiny@main", "revision: found 'main', expected a commit of 40 hex digits"),
        (lambda *_: "runs:/some/package", "^MLFLOW_TRACKING_URI: missing, expected the address"),
        (lambda *_: "models:/some/1", "^MLFLOW_TRACKING_URI: missing, expected the address"),
    ],
)
def test_a_failed_fetch_is_one_line_and_leaves_no_files(
    make: Callable[[Path, Path], Any], text: str, models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The error says what was found and expected, and the models root stays unchanged."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    reference = make(tmp_path / "hub", tmp_path)
    before = sorted(models_root.rglob("*"))
    with pytest.raises(ConfigurationError, match=text) as refused:
        package_folder(reference, models_root)
    assert "\n" not in str(refused.value)
    assert str(tmp_path) not in str(refused.value)
    assert sorted(models_root.rglob("*")) == before


@pytest.mark.parametrize("reference", ["models/mlp/1", "/models/a@b/1", "./a@b", "here@home"])
def test_a_folder_stays_where_it_is(reference: str, models_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A path is a path, with an @ in it or not."""
    (tmp_path / "here@home").mkdir()
    monkeypatch.chdir(tmp_path)
    assert not is_elsewhere(reference)
    assert package_folder(reference, models_root) == Path(reference)
    assert list(models_root.iterdir()) == []
