"""The first answer of one's own model: new package, edit, check, stack, three lines of Python.

The environment is installed. Each program is a process of its own with its imports, as a user starts it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from tests.benchmarks.report import Progress, Row, median, verdict
from tests.benchmarks.scale import Scale
from tests.servers import ROOT

__all__ = ["measure"]

_LIMIT_S: Final = 20.0
_PENSTOCK: Final = (sys.executable, "-m", "penstock")
_READY_S: Final = 120.0
_APP: Final = """\
import penstock

@penstock.model(inputs={"x": ("float32", ["batch", 4])}, outputs={"y": ("float32", ["batch"])})
def mine(x):
    return x.sum(axis=1) * 2
"""
_LINES: Final = """\
from penstock import Client
with Client.from_env() as client:
    print(client.submit("mine", {"x": [[1.0, 2.0, 3.0, 4.0]]}).result(timeout=30))
"""


class _Times(NamedTuple):
    """Seconds of each step."""

    new: float
    check: float
    up: float
    answer: float


def measure(scale: Scale, say: Progress) -> list[Row]:
    """See the module."""
    return [
        _row(what, kind, scale.rounds, say)
        for what, kind in (("a function", "python"), ("a torch module", "pytorch"), ("one file", ""))
    ]


def _row(what: str, kind: str, rounds: int, say: Progress) -> Row:
    tries = []
    for _ in range(rounds):
        tries.append(_try(kind))
        say(f"first answer: {what}: {sum(tries[-1]):.1f} s")
    steps = {step: median(getattr(each, step) for each in tries) for step in _Times._fields}
    whole_s = median(sum(each) for each in tries)
    parts = ", ".join(f"{step} {seconds:.1f}" for step, seconds in steps.items())
    return Row(
        f"first answer of one's own model, {what}: from nothing to the end of three lines of Python",
        f"{whole_s:.1f} s ({parts})",
        f"<= {_LIMIT_S:g} s",
        ok=verdict(required=whole_s <= _LIMIT_S),
        figures={"seconds": whole_s, **steps},
    )


def _try(kind: str) -> _Times:
    # A short path: that of a unix socket ends at 107 bytes.
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        folder = Path(place)
        environ = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PENSTOCK_HOME": f"{place}/home",
            "PENSTOCK_METRICS_PORT": "0",
            "PYTHONPATH": str(ROOT),
            "PYTHONUNBUFFERED": "1",
        }
        begun = time.monotonic()
        lines, checked, served = _begin(folder, kind, environ)
        made = time.monotonic()
        _run([*_PENSTOCK, "models", "check", checked, "--device", "cpu"], folder, environ)
        correct = time.monotonic()
        with _stack([*served, "--device", "cpu", "--no-flower"], folder, environ):
            ready = time.monotonic()
            answer = _run([sys.executable, "-c", lines], folder, environ)
            if "'y': array([" not in answer:
                raise ValueError(f"Wrong answer: {answer:.80}")
            return _Times(made - begun, correct - made, ready - correct, time.monotonic() - ready)


def _begin(folder: Path, kind: str, environ: Mapping[str, str]) -> tuple[str, str, list[str]]:
    """(the lines of Python to run, what to check, the command of the stack) of a model that was edited."""
    if not kind:
        (folder / "mine.py").write_text(_APP)
        return _LINES, "mine.py", ["up", "--app", "mine.py"]
    told = _run([*_PENSTOCK, "new", "mine", "--format", kind], folder, environ).splitlines()
    code = folder / "models" / "mine" / "1" / "model.py"
    code.write_text(code.read_text() + "\n# edited\n")
    lines = told[told.index("  from penstock import Client") :]
    return "\n".join(line.removeprefix("  ") for line in lines), "models/mine/1", ["up"]


def _run(command: list[str], folder: Path, environ: Mapping[str, str]) -> str:
    ran = subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=_READY_S, check=False
    )
    if ran.returncode:
        raise RuntimeError(f"{' '.join(command[2:5])} ended with {ran.returncode}: {ran.stderr.strip():.200}")
    return ran.stdout


@contextmanager
def _stack(arguments: list[str], folder: Path, environ: Mapping[str, str]) -> Iterator[None]:
    """`penstock up`, once it says that it is ready."""
    stack = subprocess.Popen([*_PENSTOCK, *arguments], cwd=folder, env=environ, stdout=subprocess.PIPE, text=True)
    try:
        if not any(line.startswith("Ready") for line in stack.stdout or ()):
            raise RuntimeError("penstock up ended before it was ready")
        yield
    finally:
        stack.send_signal(signal.SIGINT)
        stack.wait(_READY_S)
        if stack.stdout is not None:
            stack.stdout.close()
