"""Beside packages of others: theirs and ours work, and pip takes nothing of theirs away with ours."""

from __future__ import annotations

import json
import sys
from hashlib import sha256
from pathlib import Path
from textwrap import dedent

import pytest

from tests.install.conftest import StartInstalled
from tests.install.environments import Environment
from tests.packages import write_double
from tests.servers import RedisServer

NAMES = ["compose", "producers", "registry", "safety", "testing", "workers"]
FOREIGN = """
OWNER = "another project"


def __getattr__(name):
    raise AttributeError(f"a module of Penstock asked the package of another project for {name}")
"""
TASKS = """
from celery import shared_task


@shared_task
def add(x, y):
    return x + y
"""
PROGRAM = """
import json
import sys

import compose, producers, registry, safety, testing, workers
from celery import current_app
from penstock import Client
from tasks import add

with Client.from_env() as client:
    answer = client.submit("double", {"x": [[1, 2, 3, 4]]}).result(180)["y"].tolist()
settings = {name: repr(current_app.conf[name]) for name in current_app.conf}
found = {
    "answer": answer,
    "owners": [package.OWNER for package in (compose, producers, registry, safety, testing, workers)],
    "broker": current_app.conf.broker_url,
    "queue": current_app.conf.task_default_queue,
    "ours": [name for name, value in settings.items() if "penstock" in value.lower()],
    "added": add.apply((1, 2)).get(),
}
current_app.conf.broker_url = sys.argv[1]
add.delay(1, 2)
print(json.dumps(found))
"""


def write_foreign(folder: Path) -> None:
    """Packages of another project with our folders' names."""
    for name in NAMES:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(FOREIGN)


def contents(folder: Path) -> dict[str, str]:
    """The files of the foreign packages of a folder, by digest."""
    files = [file for name in NAMES for file in (folder / name).rglob("*.py")]
    return {str(file.relative_to(folder)): sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture
def shared_environment(wheel: Path, tmp_path: Path) -> Environment:
    """The wheel beside foreign packages; what it requires is found among the packages of this test run."""
    environment = Environment(tmp_path / "environment")
    write_foreign(environment.packages)
    environment.install(str(wheel), options=["--no-deps", "--no-index"])
    paths = [path for path in sys.path if path.endswith("site-packages")]
    (environment.packages / "shared.pth").write_text("".join(f"{path}\n" for path in paths))
    return environment


def test_others_and_ours_work_together(
    shared_environment: Environment,
    redis_server: RedisServer,
    start_installed: StartInstalled,
    models_root: Path,
    tmp_path: Path,
):
    """Client, worker and a Celery program without a broker, where all our folders' names belong to others.

    The names are taken in site-packages and in the folders where the processes run, which come first on their path.
    In the end Penstock is uninstalled, and the packages of others are whole.
    """
    before = contents(shared_environment.packages)
    assert len(before) == len(NAMES)
    write_double(models_root)
    (tmp_path / "worker").mkdir()
    write_foreign(tmp_path / "worker")
    worker = start_installed(shared_environment, redis_server, models_root)
    project = shared_environment.folder
    write_foreign(project)
    (project / "tasks.py").write_text(TASKS)
    (project / "program.py").write_text(dedent(PROGRAM))
    theirs = f"{redis_server.celery_url.partition('?')[0]}?virtual_host=5"
    variables = {"PENSTOCK_REDIS_URL": redis_server.url, "PENSTOCK_HOME": str(tmp_path / "home")}
    ended = shared_environment.run("python", "program.py", theirs, environment=variables)
    assert ended.returncode == 0, f"{ended.stderr}\n{worker.tail()}"
    assert json.loads(ended.stdout) == {
        "answer": [[2.0, 4.0, 6.0, 8.0]],
        "owners": ["another project"] * len(NAMES),
        "broker": None,
        "queue": "celery",
        "ours": [],
        "added": 3,
    }
    with redis_server.client() as client:
        assert client.llen("penstock") == 0
        client.select(5)
        assert client.llen("celery") == 1
    worker.stop()
    shared_environment.uninstall("penstock")
    assert contents(shared_environment.packages) == before
    assert not (shared_environment.packages / "penstock").exists()
