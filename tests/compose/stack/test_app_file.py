"""`--app FILE`: the environment of workers that serve the models of one file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from penstock import Client
from penstock.compose.stack.app_file import serving
from penstock.compose.stack.fleet import Device
from penstock.compose.stack.local import LocalStack
from penstock.registry.settings import Settings
from penstock.workers.versions.repository import DiskRepository
from tests.servers import ROOT

TEXT = """
import penstock
import beside
X = {"x": ("float32", ["batch", 4])}

@penstock.model(inputs=X, outputs={"y": ("float32", ["batch", 4])})
def scaled(x):
    return x * beside.FACTOR
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a model, which imports the module beside it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "beside.py").write_text("import numpy as np\nFACTOR = np.float32(3)\n")
    (folder / "my_models.py").write_text(TEXT)
    return folder / "my_models.py"


def test_workers_serve_the_models_of_the_file_and_no_others(tmp_path: Path, file: Path):
    """Its packages lie under the home, and their folder is a trusted root."""
    environ = serving(file, {"PENSTOCK_HOME": str(tmp_path / "home")})
    settings = Settings.load(environ=environ)
    (package,) = DiskRepository.of(settings).initial_packages(settings)
    assert package.spec.reference == "scaled/1"
    assert package.folder.is_relative_to(tmp_path / "home" / "apps")
    assert environ["PYTHONPATH"] == str(file.parent)


def test_trusted_roots_of_the_settings_stay(tmp_path: Path, file: Path):
    """An operator who names roots also trusts the file that the command line names."""
    before = {
        "PENSTOCK_HOME": str(tmp_path / "home"),
        "PENSTOCK_TRUSTED_ROOTS": str(tmp_path / "trusted"),
        "PYTHONPATH": "/somewhere",
    }
    environ = serving(file, before)
    settings = Settings.load(environ=environ)
    assert settings.trusted_roots == (tmp_path / "trusted", settings.inference.repo_root)
    assert [each.spec.name for each in DiskRepository.of(settings).initial_packages(settings)] == ["scaled"]
    assert environ["PYTHONPATH"] == f"{file.parent}{os.pathsep}/somewhere"


@pytest.mark.slow
def test_stack_of_a_file_answers(file: Path):
    """A worker runs the function, and the module beside it is imported."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as home:
        outside = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        own = {"PYTHONPATH": str(ROOT), "PENSTOCK_HOME": home, "PENSTOCK_METRICS_PORT": "0"}
        environ = serving(file, {**outside, **own})
        settings = Settings.load(environ=environ)
        stack = LocalStack(settings, [Device("cpu", 0)], environ=environ, with_flower=False)
        with stack, Client.from_env(settings=Settings.load(environ=own)) as client:
            job = client.submit("scaled", {"x": np.ones((2, 4), np.float32)})
            assert job.result(timeout=180)["y"].tolist() == [[3.0] * 4] * 2
            (package,) = DiskRepository.of(settings).initial_packages(settings)
            assert job.info().content_hash == package.manifest().content_hash
