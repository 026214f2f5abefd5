"""The `penstock` command: help, refusals and settings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from penstock.compose.cli import main
from penstock.workers.process.exit_status import EXIT_CONFIGURATION
from tests.compose.conftest import penstock
from tests.servers import ROOT


def commands(group: click.Command, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(group, click.Group):
        for name, command in group.commands.items():
            yield from commands(command, (*path, name))
    else:
        yield path


@pytest.mark.parametrize("path", list(commands(main)), ids=" ".join)
def test_every_command_shows_an_example(path):
    """`--help` of each command has an example that can be typed."""
    shown = CliRunner().invoke(main, [*path, "--help"])
    assert shown.exit_code == 0
    assert f"  penstock {' '.join(path)}" in shown.output


def test_help_is_quick():
    """Help loads no framework, no NumPy and no broker."""
    code = (
        "import sys; import penstock.compose.cli\n"
        "print(sorted({'celery', 'numpy', 'pydantic', 'redis', 'rich', 'torch'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert ended.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["submit", "nonesuch", "-i", "x=1"], "Unknown model 'nonesuch'"),
        (["submit", "double"], "Missing required input(s): x. Expected inputs: x"),
        (["submit", "double", "-i", "x=[[1, 2]]"], "x: "),
        (["models", "register", "/nonexistent/model/1"], "model/1/model.yaml: cannot be read"),
    ],
)
def test_a_refusal_is_one_line(home, arguments, line):
    """A refusal names the fault and the expectation in one line on stderr; the exit status is not 0."""
    shown = penstock(home, *arguments)
    assert shown.exit_code in (1, EXIT_CONFIGURATION)
    assert shown.stderr.startswith(f"Error: {line}")
    assert shown.stderr.count("\n") == 1
    assert shown.stdout == ""


def test_misspelt_settings_are_refused(tmp_path):
    """An unknown variable and an unknown key are refused, each with the nearest existing name."""
    shown = penstock(tmp_path, "status", PENSTOCK_REDIS_ULR="redis://localhost")
    assert shown.exit_code == EXIT_CONFIGURATION
    assert "PENSTOCK_REDIS_ULR" in shown.stderr
    assert "PENSTOCK_REDIS_URL" in shown.stderr
    config = tmp_path / "penstock.yaml"
    config.write_text("batching: {max_wait: 5}\n")
    shown = penstock(tmp_path, "--config", str(config), "status")
    assert shown.exit_code == EXIT_CONFIGURATION
    assert "batching.max_wait_ms" in shown.stderr
