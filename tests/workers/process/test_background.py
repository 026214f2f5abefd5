"""Processes that give way to all others."""

from __future__ import annotations

import os
import subprocess
import sys

_PROGRAM = """
import os, subprocess, sys, threading
from penstock.workers.process.background import give_way

give_way()
show = "import os; print(os.sched_getscheduler(0), os.nice(0))"
print(os.sched_getscheduler(0), os.nice(0))
thread = threading.Thread(target=lambda: print(os.sched_getscheduler(0), os.nice(0)))
thread.start(), thread.join()
sys.stdout.flush()
subprocess.run([sys.executable, "-c", show], check=True)
"""


def test_a_process_its_threads_and_its_children_give_way():
    """All of them are in the class that gets what nobody else wants."""
    shown = subprocess.run([sys.executable, "-c", _PROGRAM], check=True, capture_output=True, text=True).stdout
    assert shown.splitlines() == [f"{os.SCHED_IDLE} 19"] * 3
