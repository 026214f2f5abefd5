"""Models that misbehave on purpose, for fault tests; NumPy only.

Each answers 2 x and notes its forwards like tests.packages.write_recorder. A row that begins with a negative number
is poison: the fault happens in each batch with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import indent

import yaml

from tests.packages import write_package

__all__ = [
    "CLOSING",
    "CLOSING_ALL",
    "DEADLY",
    "HANGING",
    "HARMLESS",
    "RAISING",
    "write_cramped",
    "write_large",
    "write_misbehaving",
    "write_poisonable",
]

DEADLY = {
    "SIGSEGV": "ctypes.string_at(0)",
    "os._exit": "os._exit(0)",
    "abort": "os.abort()",
}
"""Ends of a process that no `except` sees."""
HANGING = {
    "asleep": "time.sleep(3600)",
    "holding the GIL": "ctypes.PyDLL(None).sleep(3600)",
}
"""Calls that never return; in the second, no other thread of the process runs either."""
RAISING = {
    "KeyboardInterrupt": "raise KeyboardInterrupt",
    "GeneratorExit": "raise GeneratorExit('an end')",
    "CancelledError": "raise asyncio.CancelledError",
    "BaseException": "raise Own('own')",
    "BaseExceptionGroup": "raise BaseExceptionGroup('several', [KeyboardInterrupt(), ValueError('one')])",
    "SystemExit": "sys.exit('goodbye')",
    "StopIteration": "raise StopIteration(inputs)",
    "RecursionError": "endless()",
    "no text": "raise Unreadable",
    "text that interrupts": "raise Interrupting",
    "text that is no plain str": "raise Evasive",
    "properties that raise": "raise Unapproachable",
    "a cause that has no text": "raise ValueError('outer') from Interrupting()",
    "a lone surrogate": "raise ValueError('\\udcff')",
    "a surrogate in the name": "raise Nameless",
    "100 MB": "raise ValueError('x' * 100_000_000)",
    "NUL and line ends": "raise ValueError('a\\0b\\n\\n\\r')",
    "an error of ours without text": "raise Refusal",
}
"""Statements that raise, by what is wrong with the exception."""
CLOSING = {
    "sys.stdout": "sys.stdout.close()",
    "sys.stdout and sys.stderr": "sys.stdout.close(); sys.stderr.close()",
    "descriptor 1": "os.close(1)",
    "descriptors 1 and 2": "os.close(1); os.close(2)",
    "descriptors 0 to 2": "os.closerange(0, 3)",
    "descriptors 1 and 2, redirected": "hole = os.open(os.devnull, os.O_RDWR); os.dup2(hole, 1); os.dup2(hole, 2)",
}
"""Statements after which the standard streams of the process are gone."""
CLOSING_ALL = {
    "all above 2": "os.closerange(3, 4096)",
    "all": "os.closerange(0, 65536)",
}
"""Statements after which the process has no connection, no lock and no pipe."""
HARMLESS = {
    "changes the folder": "os.chdir('/')",
    "replaces signal handlers": "replace_handlers()",
    "lowers the recursion limit": "sys.setrecursionlimit(150)",
    "empties the environment": "os.environ.clear()",
    "forks, and the child returns": "os.fork()",
    "forks, and the child raises": "raise_in_child()",
    "starts 200 threads": "[threading.Thread(target=time.sleep, args=(1,), daemon=True).start() for _ in range(200)]",
    "ends a thread of its own": "threading.Thread(target=sys.exit).start()",
    "prints 100 MB": "print('x' * 100_000_000)",
    "raises SIGALRM": "signal.raise_signal(signal.SIGALRM)",
    "starts a timer": "signal.setitimer(signal.ITIMER_REAL, 0.01); time.sleep(0.05)",
    "replaces the handlers of the log": "logging.getLogger().handlers[:] = [logging.NullHandler()]",
    "ends the logs": "logging.shutdown()",
}
"""Statements that change the process and do no harm: the job with them is answered."""
_MISBEHAVIOUR = """
import asyncio
import logging
import signal
import sys
import threading


class Own(BaseException):
    pass

class Unreadable(Exception):
    def __str__(self):
        raise RuntimeError("no text")
    __repr__ = __str__

class Interrupting(Exception):
    def __str__(self):
        raise KeyboardInterrupt
    __repr__ = __str__

class Text(str):
    def __getitem__(self, place):
        return 7
    def encode(self, *how):
        raise SystemExit
    __str__ = __format__ = __len__ = encode

class Evasive(Exception):
    def __str__(self):
        return Text("evasive")

class Unapproachable(Exception):
    def refuse(self):
        raise KeyboardInterrupt
    __class__ = __cause__ = __context__ = __traceback__ = __suppress_context__ = args = property(refuse)

class NameOfItsOwn(type):
    @property
    def __name__(cls):
        return "\\udcff"

class Nameless(Exception, metaclass=NameOfItsOwn):
    pass

class Refusal(ModelError):
    def __str__(self):
        raise GeneratorExit

def endless():
    return endless()

def replace_handlers():
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            signal.signal(number, signal.SIG_IGN)
        except ValueError:
            # Only the main thread may.
            pass

def raise_in_child():
    if os.fork() == 0:
        raise ValueError("a child")
"""


def write_poisonable(root: Path, forward_log: Path, name: str, fault: str) -> Path:
    """Does `fault`, a statement, when it meets poison."""
    return write_package(root, name, _source(forward_log, f"if min(rows) < 0:\n    {fault}"))


def write_cramped(root: Path, forward_log: Path, name: str, *, fits: int, max_batch_size: int) -> Path:
    """Runs out of memory in every batch of more than `fits` rows."""
    return write_package(
        root,
        name,
        _source(forward_log, f'if len(rows) > {fits}:\n    raise MemoryError("no room for so many rows")'),
        max_batch_size=max_batch_size,
    )


def write_misbehaving(root: Path, forward_log: Path, name: str, faults: Sequence[str]) -> Path:
    """Executes the fault at index i when a row begins with -(i + 1)."""
    cases = "\n".join(f"if -{number} in rows:\n{indent(fault, '    ')}" for number, fault in enumerate(faults, 1))
    source = _source(forward_log, cases)
    return write_package(root, name, f"from penstock import ModelError\n{_MISBEHAVIOUR}\n{source}")


def _source(forward_log: Path, fault: str) -> str:
    return f"""\
import ctypes
import json
import os
import time


def build():
    def forward(inputs):
        rows = inputs["x"][:, 0].tolist()
        # Opened for each line: a fault may close every descriptor.
        with open({str(forward_log)!r}, "ab", buffering=0) as forward_log:
            forward_log.write((json.dumps({{"pid": os.getpid(), "rows": rows}}) + "\\n").encode())
{indent(fault, " " * 8)}
        return {{"y": inputs["x"] * 2}}

    return forward
"""


def write_large(root: Path, forward_log: Path, name: str, *, columns: int) -> Path:
    """Answers with `columns` floats a row: 2 x in the first column, and x in the last. Its signature says so."""
    package = write_package(root, name, _large_source(forward_log, columns), max_batch_size=32)
    spec = yaml.safe_load((package / "model.yaml").read_text())
    spec["outputs"][0]["shape"] = ["batch", columns]
    (package / "model.yaml").write_text(yaml.safe_dump(spec))
    return package


def _large_source(forward_log: Path, columns: int) -> str:
    return f"""\
import json
import os

import numpy as np


def build():
    forward_log = os.open({str(forward_log)!r}, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def forward(inputs):
        x = inputs["x"][:, 0]
        os.write(forward_log, (json.dumps({{"pid": os.getpid(), "rows": x.tolist()}}) + "\\n").encode())
        y = np.zeros((len(x), {columns}), np.float32)
        y[:, 0], y[:, -1] = x * 2, x
        return {{"y": y}}

    return forward
"""
