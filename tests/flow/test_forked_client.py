"""A client survives a fork, as under Gunicorn or Celery's prefork: both sides go on, each on its own connections."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.flow.conftest import Fleet
from tests.servers import ROOT

PROGRAM = """
import os, sys, threading, time
from penstock import Client

def ask(number):
    return client.submit("double", {"x": [[number, 0, 0, 0]]}).result(180)["y"][0, 0]

client = Client(sys.argv[1])
assert ask(1) == 2
slow = client.submit("counter", {"count": [10], "delay_ms": [200.0]})
waiting = threading.Thread(target=slow.result)
waiting.start()
children = []
for child in range(3):
    if (pid := os.fork()) == 0:
        begun = time.monotonic()
        answers = [ask(100 * child + number) for number in range(30)]
        is_right = answers == [2 * (100 * child + number) for number in range(30)]
        os._exit(not is_right or time.monotonic() - begun > 10)
    children.append(pid)
assert [ask(1000 + number) for number in range(30)] == [2 * (1000 + number) for number in range(30)]
waiting.join(60)
assert slow.result(0)["total"][0] == 10
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
print("all answered")
"""


def test_parent_and_children_go_on(fleet: Fleet):
    """Forked while a thread reads replies: children and parent submit and read at once, and that thread's job ends."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fleet.server.url], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert (done.returncode, done.stdout) == (0, "all answered\n"), done.stderr


ASYNC_PROGRAM = """
import asyncio, os, sys
from penstock import AsyncClient

client = AsyncClient(sys.argv[1])

async def answers(base):
    async def ask(number):
        job = await client.submit("double", {"x": [[number, 0, 0, 0]]})
        return (await job.result(180))["y"][0, 0]
    got = await asyncio.gather(*[ask(base + number) for number in range(50)])
    await client.aclose()
    return got == [2 * (base + number) for number in range(50)]

children = []
for child in range(3):
    if (pid := os.fork()) == 0:
        os._exit(not asyncio.run(answers(100 * child)))
    children.append(pid)
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
print("all answered")
"""


def test_asyncio_client_made_before_a_fork_serves_every_child(fleet: Fleet):
    """As under Gunicorn with preload: children do not share a reply stream, so none takes another's replies away."""
    done = subprocess.run(
        [sys.executable, "-c", ASYNC_PROGRAM, fleet.server.url], cwd=ROOT, capture_output=True, text=True, timeout=180
    )
    assert (done.returncode, done.stdout) == (0, "all answered\n"), done.stderr


POOL_PROGRAM = """
import sys
from multiprocessing import get_context
from penstock import Client

client = Client(sys.argv[1])  # a spawned child runs this line again

def ask(number):
    return float(client.submit("double", {"x": [[number, 0, 0, 0]]}).result(180)["y"][0, 0])

def read(job):
    return float(client.job(job).result(180)["y"][0, 0])

if __name__ == "__main__":
    assert ask(1000) == 2000
    with get_context(sys.argv[2]).Pool(3) as pool:
        assert pool.map(ask, range(30)) == [2.0 * number for number in range(30)]
        jobs = [client.submit("double", {"x": [[number, 0, 0, 0]]}) for number in range(30, 40)]
        assert pool.map(read, jobs) == [2.0 * number for number in range(30, 40)]
    assert ask(1001) == 2002
    print("all answered")
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_children_of_a_pool_ask_and_read(start: str, fleet: Fleet, tmp_path: Path):
    """A client of the module serves the parent and each child of the pool; handles travel as arguments."""
    program = tmp_path / "program.py"
    program.write_text(POOL_PROGRAM)
    command = [sys.executable, str(program), fleet.server.url, start]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "all answered\n"), done.stderr
