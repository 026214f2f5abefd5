"""Forks of a process end with it and hold nothing of it; a guard ends a whole process group and removes its folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.processes import group_of, is_alive
from tests.servers import ROOT, wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux kills children with their parent")

FORKS: Final = """
import json, os, pathlib, socket, sys, threading, time
from penstock.workers import children

folder = pathlib.Path(sys.argv[1])
lock, other = ((folder / name).open("w") for name in ("lock", "other"))
duplicate = os.dup(lock.fileno())
listener = socket.socket(socket.AF_UNIX)
listener.bind(str(folder / "broker"))
listener.listen()
broker = socket.socket(socket.AF_UNIX)
broker.connect(str(folder / "broker"))
pair, _ = socket.socketpair()
children.own(lock.fileno())
children.protect_forks(broker_urls=[f"unix://{folder}/broker?db=0"])
held = dict(lock=lock, duplicate=duplicate, other=other, broker=broker, pair=pair)

def tell(generation):
    files = {name: os.readlink(f"/proc/self/fd/{each if type(each) is int else each.fileno()}")
             for name, each in held.items()}
    # One write: lines of several processes do not mix.
    os.write(1, (json.dumps([generation, os.getpid(), files]) + "\\n").encode())

def fork():
    if os.fork() == 0:
        if os.fork() == 0:
            tell("grandchild")
            time.sleep(600)
        tell("child")
        time.sleep(600)

thread = threading.Thread(target=fork)
thread.start()
thread.join()
tell("parent")
time.sleep(600)
"""
RETURNS: Final = """
import contextlib, os
from penstock.workers import children
with contextlib.suppress(ValueError), children.ForksEnd():
    forked = os.fork()
    if not forked and {raises}:
        raise ValueError
if not forked:
    os._exit(7)
print(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
"""
GUARDED: Final = """
import pathlib, subprocess, sys, time
from penstock.workers import children
children.start_guard(0, pathlib.Path(sys.argv[1]))
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=False)
print(child.pid, flush=True)
while sys.argv[2] == "stays":
    time.sleep(1)
"""


def command(program: str, *arguments: object) -> list[str]:
    return [sys.executable, "-W", "ignore", "-c", program, *map(str, arguments)]


@pytest.fixture
def told(tmp_path: Path) -> Any:
    """A process whose thread forked and ended: what each generation holds; and its end, on request."""
    with subprocess.Popen(command(FORKS, tmp_path), cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        try:
            lines = [json.loads(parent.stdout.readline()) for _ in range(3)]
            yield {generation: (pid, files) for generation, pid, files in lines}, parent
        finally:
            parent.kill()


def test_forks_end_with_their_process_not_with_the_thread_that_forked(told):
    """Child and grandchild outlive the thread that forked them. When the process is killed, the kernel kills both."""
    about, parent = told
    forks = [about["child"][0], about["grandchild"][0]]
    assert all(map(is_alive, forks))
    parent.kill()
    wait_until(lambda: not any(map(is_alive, forks)), 10, "both forks are gone")


def test_forks_hold_nothing_of_their_process(told, tmp_path: Path):
    """The lock, its duplicate and the connection to the broker are /dev/null in forks; files of a model's code stay."""
    about, _ = told
    _, parents = about["parent"]
    assert parents["lock"] == parents["duplicate"] == str(tmp_path / "lock")
    for generation in ("child", "grandchild"):
        _, files = about[generation]
        assert files.pop("lock") == files.pop("duplicate") == files.pop("broker") == os.devnull
        assert files == {name: parents[name] for name in files}


@pytest.mark.parametrize("raises", [False, True], ids=["returns", "raises"])
def test_fork_that_comes_back_from_a_models_code_ends(raises: bool):
    """It has one thread of a worker, and would wait for work that no other thread brings."""
    ended = subprocess.run(
        command(RETURNS.format(raises=raises)), cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert ended.stdout == "1\n"


@pytest.mark.parametrize("held_up", [False, True], ids=["alive", "stopped"])
def test_guard_ends_the_group_when_the_parent_is_gone(held_up: bool, tmp_path: Path):
    """Also a process that does not run: no thread of its own could end it. The folder goes, too."""
    folder = tmp_path / "build"
    folder.mkdir()
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command(GUARDED, folder, "stays"), cwd=ROOT, stdin=pipe, stdout=pipe, start_new_session=True
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        process.stdout.readline()
        assert len(group_of(process.pid)) == 3
        if held_up:
            process.send_signal(signal.SIGSTOP)
        assert folder.exists()
        process.stdin.close()
        assert process.wait(180) == -signal.SIGKILL
        wait_until(lambda: not group_of(process.pid), 10, "the group is gone")
    assert not folder.exists()


def test_guard_keeps_the_folder_of_a_process_that_has_ended(tmp_path: Path):
    """The parent still reads it. Children that the process left are gone."""
    with subprocess.Popen(
        command(GUARDED, tmp_path, "ends"),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.wait(180) == 0
        wait_until(lambda: not group_of(process.pid), 10, "the group is gone")
        assert tmp_path.exists()
