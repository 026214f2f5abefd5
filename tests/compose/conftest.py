"""A stack as `penstock up` runs it, and a run of the command in this process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from penstock.compose.cli import main
from penstock.compose.stack.fleet import Device
from penstock.compose.stack.local import LocalStack
from penstock.registry.settings import Settings
from tests.packages import write_double
from tests.servers import ROOT


@pytest.fixture(scope="package")
def home() -> Iterator[Path]:
    """The home of a stack that serves `double`."""
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        write_double(Path(folder) / "models")
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_HOME": f"{folder}/home",
            "PENSTOCK_INFERENCE_REPO_ROOT": f"{folder}/models",
            "PENSTOCK_METRICS_PORT": "0",
        }
        settings = Settings.load(environ=environ)
        with LocalStack(settings, [Device("cpu", 0)], environ=environ, with_flower=False):
            yield settings.home


def penstock(home: Path, *arguments: str, stdin: str = "", **environ: str) -> Result:
    """One run of the command in this process."""
    return CliRunner().invoke(main, arguments, input=stdin, env={"PENSTOCK_HOME": str(home), **environ})
