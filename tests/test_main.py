"""The entry point of the `penstock` command, with and without the packages of its extras."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from penstock import __main__ as entry
from penstock.registry.extras import EXTRAS
from tests.architecture.test_imports import base_packages
from tests.install import only
from tests.servers import ROOT


def run(packages: set[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in a process that can import these packages of others only."""
    command = [sys.executable, only.__file__, ",".join({"penstock", *packages}), entry.__file__, *arguments]
    return subprocess.run(
        command, env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )


def test_help_is_shown():
    """With everything installed the entry point is the command."""
    ended = subprocess.run([sys.executable, "-m", "penstock", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0
    assert "penstock demo" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [
        ([], "cli"),
        (["--help"], "cli"),
        (["status"], "cli"),
        (["worker"], "worker"),
        (["--config", "x", "up"], "worker"),
    ],
)
def test_base_install_names_the_extra(arguments: list[str], extra: str):
    """Without its extra every command is one line: the package that is missing and what to type; the status is 78."""
    ended = run(base_packages(), *arguments)
    line = f"Error: alembic is not installed. Expected: pip install '.[{extra}]' in the checkout of Penstock\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (os.EX_CONFIG, "", line)


def test_operators_install_names_the_extra_of_workers():
    """With [cli] alone, a command that would start workers says what they need."""
    ended = run(base_packages() | set(EXTRAS["cli"]), "worker")
    assert ended.returncode == os.EX_CONFIG
    assert ended.stderr == (
        "Error: prometheus-client is not installed. Expected: pip install '.[worker]' in the checkout of Penstock\n"
    )


def test_each_command_that_starts_workers_is_known():
    """A name in the entry point is a command."""
    from penstock.compose.cli import main

    assert set(main.commands) >= entry.STARTS_WORKERS
