"""The child process that traces and compiles: started, awaited, ended. Its files are returned as bytes.

    request, one line of JSON -> stdin of `workers/compilation/build.py` -> *.part files -> parts by name

The child has no secrets in its environment. It has a folder that only this user can enter and that is removed with it,
and its own compiler cache. When this process ends, its guard sees that its stdin is closed, and ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from penstock.workers import children
from penstock.workers.compilation.cpp_library import shared_library_environment
from penstock.workers.runtime.compilable import CompilationRefused

__all__ = ["FINDINGS", "PART_SUFFIX", "BuildProcess"]

FINDINGS: Final = "findings"
"""The part with the findings as JSON or, under `refused`, the reason why there are no other parts."""
PART_SUFFIX: Final = ".part"
_SECRETS: Final = "PENSTOCK_"


class BuildProcess:
    """Runs one build at a time."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_stopped = False

    def run(self, request: Mapping[str, object], threads: int) -> dict[str, bytes]:
        """The parts that the child made; CPU code uses `threads` threads. Raises CompilationRefused."""
        with tempfile.TemporaryDirectory(prefix="penstock-compile-") as name:
            folder = Path(name)
            status = self._run(json.dumps({**request, "folder": name}).encode(), _environment(folder, threads))
            parts = {path.stem: path.read_bytes() for path in folder.glob(f"*{PART_SUFFIX}")}
        if self._is_stopped:
            raise CompilationRefused("The worker is stopping")
        if status != 0 or FINDINGS not in parts:
            raise CompilationRefused(f"The compiler's process ended with status {status}")
        reason = json.loads(parts[FINDINGS]).get("refused")
        if reason is not None:
            raise CompilationRefused(reason)
        return parts

    @property
    def is_stopped(self) -> bool:
        """Whether every later build is refused."""
        return self._is_stopped

    def stop(self) -> None:
        """Ends the build under way. It and every later build are refused."""
        with self._lock:
            self._is_stopped = True
            if self._child is not None:
                _end(self._child)

    def _run(self, request: bytes, environment: dict[str, str]) -> int:
        """The exit status. Raises CompilationRefused after the time-out."""
        child = self._start(environment)
        try:
            _send(child, request)
            return child.wait(self._timeout_s)
        except subprocess.TimeoutExpired:
            raise CompilationRefused(f"The compiler took longer than {self._timeout_s:.0f} s") from None
        finally:
            with self._lock:
                self._child = None
                _end(child)
            child.wait()
            if child.stdin is not None:
                child.stdin.close()

    def _start(self, environment: dict[str, str]) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._is_stopped:
                raise CompilationRefused("The worker is stopping")
            # A new process group, so that the C++ compiler ends with the child.
            self._child = subprocess.Popen(
                [sys.executable, "-m", "penstock.workers.compilation.build"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=environment,
                start_new_session=True,
            )
            if self._child.stdin is not None:
                children.own(self._child.stdin.fileno())
            return self._child


def _send(child: subprocess.Popen[bytes], request: bytes) -> None:
    """Writes the request and leaves the pipe open."""
    if child.stdin is None:
        raise RuntimeError("the child was started without a pipe")
    # The child may have ended already. Its exit status says why.
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(request + b"\n")
        child.stdin.flush()


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills the child and the processes that it started. After a wait, its pid may belong to another process."""
    if child.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)


def _environment(folder: Path, threads: int) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_SECRETS)}
    return {
        **inherited,
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "TMPDIR": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        **shared_library_environment(folder),
    }
