"""A client survives a fork, as under Gunicorn or Celery's prefork: both sides go on, each on its own connections."""

from __future__ import annotations

import subprocess
import sys

from tests.flow.conftest import Fleet
from tests.servers import ROOT

PROGRAM = """
import os, sys
from producers import Client

def ask(number):
    return client.submit("double", {"x": [[number, 0, 0, 0]]}).result(10)["y"][0, 0]

client = Client(sys.argv[1])
assert ask(1) == 2
waiting = client.submit("napper", {"x": [[5, 0, 0, 0]]})
children = []
for child in range(3):
    if (pid := os.fork()) == 0:
        answers = [ask(100 * child + number) for number in range(30)]
        os._exit(answers != [2 * (100 * child + number) for number in range(30)])
    children.append(pid)
assert [ask(1000 + number) for number in range(30)] == [2 * (1000 + number) for number in range(30)]
assert waiting.result(10)["y"][0, 0] == 10
assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [0, 0, 0]
print("all answered")
"""


def test_parent_and_children_go_on(fleet: Fleet):
    """Three children and their parent submit and read at once; a job from before the fork is the parent's still."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, fleet.server.url], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "all answered\n"), done.stderr
