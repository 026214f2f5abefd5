"""Settings that contradict each other, and packages under the models root, as check functions see them.

Each contradiction with its fix is tested in test_doctor.py.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.compose.doctor.configuration import check_contradictions, check_home, check_packages
from penstock.compose.doctor.findings import Finding
from penstock.registry.settings import Settings
from tests.packages import write_double, write_package

Load = Callable[..., Settings]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    """Settings of a shell with these variables."""
    base = {"PENSTOCK_HOME": str(tmp_path / "home"), "PENSTOCK_INFERENCE_REPO_ROOT": str(tmp_path / "models")}
    return lambda **environ: Settings.load(environ=base | environ, cwd=tmp_path)


def test_the_defaults_do_not_contradict_each_other(load: Load):
    """A shell without variables has one good finding."""
    assert list(check_contradictions(load())) == [Finding("settings", "ok", "no unknown name, no contradiction")]


def test_a_celery_broker_without_a_job_broker_is_found(load: Load):
    """Celery's broker alone carries no jobs; with both brokers there is no contradiction."""
    celery = {"PENSTOCK_CELERY_URL": "redis://host/1"}
    (finding,) = check_contradictions(load(**celery))
    assert (finding.status, finding.fix) == ("warning", "PENSTOCK_REDIS_URL=redis://host:6379/0")
    (finding,) = check_contradictions(load(**celery, PENSTOCK_REDIS_URL="redis://host/0"))
    assert finding.status == "ok"


def test_every_contradiction_is_a_finding(load: Load):
    """Two contradictions are two warnings, and no good finding stands beside them."""
    settings = load(PENSTOCK_INFERENCE_QUEUE_LEASE_S="0.2", PENSTOCK_INFERENCE_QUEUE_JOB_TTL_S="10")
    assert [finding.status for finding in check_contradictions(settings)] == ["warning", "warning"]


def test_the_delay_counts_only_while_batches_are_formed(load: Load):
    """With batching off, a long batching delay contradicts nothing."""
    delay = {"PENSTOCK_INFERENCE_BATCHING_MAX_WAIT_MS": "500"}
    assert [finding.status for finding in check_contradictions(load(**delay))] == ["warning"]
    off = load(**delay, PENSTOCK_INFERENCE_BATCHING_ENABLED="false")
    assert [finding.status for finding in check_contradictions(off)] == ["ok"]


def test_a_machine_without_models_can_submit(load: Load):
    """A client's machine has no models root, and nothing is wrong with it."""
    (finding,) = check_packages(load())
    assert finding.status == "ok"
    assert "it cannot run a worker" in finding.what


def test_packages_are_listed_and_bad_ones_are_broken(load: Load, tmp_path: Path):
    """Each package that does not load is a finding; the last finding lists the others."""
    root = tmp_path / "models"
    root.mkdir()
    assert [finding.what for finding in check_packages(load())] == ["packages that load: none"]
    write_double(root)
    for name in ("bad", "worse"):
        (write_package(root, name, "") / "model.yaml").write_text("name: 7")
    *broken, good = check_packages(load())
    assert [finding.status for finding in broken] == ["broken", "broken"]
    assert good.what == "packages that load: double/1"


def test_code_outside_the_trusted_roots_is_broken(load: Load, tmp_path: Path):
    """A package with code loads only under a trusted root, as in a worker."""
    write_double(tmp_path / "models")
    *broken, good = check_packages(load(PENSTOCK_TRUSTED_ROOTS=str(tmp_path / "elsewhere")))
    assert ([finding.status for finding in broken], good.what) == (["broken"], "packages that load: none")


def test_missing_python_packages_are_a_warning(load: Load, tmp_path: Path):
    """Requirements of a model that this environment does not meet: a warning with the line for pip."""
    folder = write_double(tmp_path / "models")
    (folder / "requirements.txt").write_text("numpy\nno-such-package-of-anybody>=2\n")
    warning, good = check_packages(load())
    assert warning == Finding(
        "models",
        "warning",
        "a worker here could not load double/1: requirements.txt: no-such-package-of-anybody is not installed",
        "pip install 'no-such-package-of-anybody>=2'",
    )
    assert good.what == "packages that load: double/1"


def test_a_requirement_that_is_none_is_broken(load: Load, tmp_path: Path):
    """A worker would refuse the package for it."""
    folder = write_double(tmp_path / "models")
    (folder / "requirements.txt").write_text("numpy\nnot a requirement\n")
    broken, _ = check_packages(load())
    assert (broken.status, broken.fix) == ("broken", "correct that line")
    assert "requirements.txt, line 2" in broken.what


def test_a_home_with_room_is_fine(load: Load, tmp_path: Path):
    """Whether it is made already or not."""
    assert list(check_home(load())) == [Finding("settings", "ok", "PENSTOCK_HOME is not made yet, and can be")]
    (tmp_path / "home").mkdir()
    assert list(check_home(load())) == [Finding("settings", "ok", "PENSTOCK_HOME can be written to")]


@pytest.mark.parametrize(
    ("url", "has_models", "status"),
    [("", False, "broken"), ("redis://host/0", True, "broken"), ("redis://host/0", False, "warning")],
    ids=["a stack", "a worker", "a client"],
)
def test_a_home_that_is_a_file_is_found(load: Load, tmp_path: Path, url: str, has_models: bool, status: str):
    """Broken where a stack or a worker may run, a warning on a machine that only submits."""
    (tmp_path / "home").touch()
    if has_models:
        (tmp_path / "models").mkdir()
    (finding,) = check_home(load(PENSTOCK_REDIS_URL=url))
    assert (finding.area, finding.status) == ("settings", status)
    assert finding.what == "PENSTOCK_HOME is a file. Expected a folder that this user may write to"
    assert finding.fix.startswith("PENSTOCK_HOME=")
