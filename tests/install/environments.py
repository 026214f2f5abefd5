"""Environments that are made for one test: empty but for what it installs, and what runs in them.

checkout --hatchling--> wheel, sdist --pip, constraints.txt--> Environment --> a client, `penstock`, a worker
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.servers import ROOT, WorkerProcess, require

SOURCES = ["CHANGELOG.md", "LICENSE", "README.md", "celeryconfig.py", "constraints.txt", "pyproject.toml", ".gitignore"]
FOLDERS = ["compose", "models", "penstock", "producers", "registry", "safety", "testing", "workers"]
OFFLINE = re.compile(r"No matching distribution|Temporary failure|Connection (refused|broken)|NewConnectionError")


def copy_sources(target: Path) -> Path:
    """What a build reads, in a folder of the test's own; links stay links."""
    target.mkdir()
    for name in FOLDERS:
        ignored = shutil.ignore_patterns("__pycache__", ".env", "secrets")
        shutil.copytree(ROOT / name, target / name, symlinks=True, ignore=ignored)
    for name in SOURCES:
        shutil.copy(ROOT / name, target)
    return target


def build(sources: Path, target: Path, kind: str) -> Path:
    """The archive of a kind, wheel or sdist, by the backend that pip calls."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(target)]
    ended = subprocess.run(command, cwd=sources, capture_output=True, text=True, check=False)
    require(None if "No module named" in ended.stderr else True, "hatchling, of the extra dev")
    assert ended.returncode == 0, ended.stderr
    return next(target.glob({"wheel": "*.whl", "sdist": "*.tar.gz"}[kind]))


class Environment:
    """A virtual environment without any package; the pip of the one that runs the tests installs into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
        self.packages = next(folder.glob("lib/python*/site-packages"))

    def install(self, *requirements: str, options: Sequence[str | Path] = ()) -> None:
        """Install with the versions of constraints.txt; without an index the test is skipped."""
        ended = self._pip("install", "--no-compile", "-c", ROOT / "constraints.txt", *options, *requirements)
        require(None if OFFLINE.search(ended.stderr) else True, "a package index")
        assert ended.returncode == 0, ended.stderr

    def uninstall(self, name: str) -> None:
        """Take a package away, as pip does it."""
        ended = self._pip("uninstall", "--yes", name)
        assert ended.returncode == 0, ended.stderr

    def _pip(self, command: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        require(find_spec("pip"), "pip")
        python = str(self.bin / "python")
        pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "--quiet"]
        # Packages on PYTHONPATH would count as installed.
        variables = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return subprocess.run(
            [*pip, command, *arguments], cwd=self.folder, env=variables, capture_output=True, text=True, check=False
        )

    def run(
        self, *command: str | Path, environment: Mapping[str, str] | None = None, timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """A program of this environment, in its folder, with nothing of ours in its environment variables."""
        variables = {"PATH": os.environ["PATH"], "HOME": str(self.folder), **(environment or {})}
        program = [self.bin / command[0], *command[1:]]
        return subprocess.run(
            program, cwd=self.folder, env=variables, capture_output=True, text=True, timeout=timeout_s, check=False
        )


class InstalledWorker(WorkerProcess):
    """A worker of another environment; as bare as its user types it."""

    environment: Environment

    def launch(self) -> None:
        """See WorkerProcess.launch; nothing of the checkout is on its path."""
        variables = {name: value for name, value in self._environment.items() if name != "PYTHONPATH"}
        python = self.environment.bin / "python"
        self._spawn([python, "-m", "celery", "-A", "penstock.workers.app", "worker"], variables)
