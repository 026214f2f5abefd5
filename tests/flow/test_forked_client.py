"""A client survives a fork, as under Gunicorn or Celery's prefork: both sides go on, each on its own connections."""

from __future__ import annotations

import subprocess
import sys

from tests.flow.conftest import Fleet
from tests.servers import ROOT

PROGRAM = """
import os, sys, threading, time
from penstock import Client

def ask(number):
    return client.submit("double", {"x": [[number, 0, 0, 0]]}).result(60)["y"][0, 0]

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
        [sys.executable, "-c", PROGRAM, fleet.server.url], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "all answered\n"), done.stderr


ASYNC_PROGRAM = """
import asyncio, os, sys
from penstock import AsyncClient

client = AsyncClient(sys.argv[1])

async def answers(base):
    async def ask(number):
        job = await client.submit("double", {"x": [[number, 0, 0, 0]]})
        return (await job.result(60))["y"][0, 0]
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
        [sys.executable, "-c", ASYNC_PROGRAM, fleet.server.url], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "all answered\n"), done.stderr
