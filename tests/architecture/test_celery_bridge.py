"""Celery is known to few files, and its private parts to one package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.servers import ROOT
from tests.sources import nodes

PACKAGES = ("compose", "producers", "registry", "safety", "testing", "workers")
CELERY = {"billiard", "celery", "kombu", "vine"}
ALLOWED = ("workers/app.py", "workers/celery_bridge/", "compose/rollout/control_client.py")
"""The application, the bridge, and the client of remote control."""


def users_of_celery(root: Path) -> list[str]:
    """The files that import Celery or one of its libraries anywhere in their text, and may not."""
    sources = [root / "celeryconfig.py", *(path for name in PACKAGES for path in (root / name).rglob("*.py"))]
    paths = [source.relative_to(root).as_posix() for source in sources if _imported(source) & CELERY]
    return sorted(path for path in paths if not path.startswith(ALLOWED))


def _imported(source: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names.add(node.module.partition(".")[0])
    return names


def test_only_the_bridge_and_the_application_import_celery():
    """A change inside Celery can then break one package only. The check covers imports inside functions, too."""
    assert users_of_celery(ROOT) == []


@pytest.mark.parametrize("line", ["import celery", "from celery.worker import state", "import kombu.messaging as k"])
def test_a_foreign_import_of_celery_is_found(tmp_path: Path, line: str):
    """The check names the file that imports Celery, and passes over the bridge."""
    (tmp_path / "workers" / "celery_bridge").mkdir(parents=True)
    (tmp_path / "workers" / "celery_bridge" / "events.py").write_text(f"{line}\n")
    (tmp_path / "workers" / "drain.py").write_text(f"def f():\n    {line}\n")
    (tmp_path / "celeryconfig.py").write_text("")
    assert users_of_celery(tmp_path) == ["workers/drain.py"]
