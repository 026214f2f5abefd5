"""Replaces this process by another program, which the kernel kills when the parent process dies.

Run as a script (`python -I -S launch.py PARENT PROGRAM ARGUMENT...`), not imported: between fork and exec of a
threaded parent no Python should run, so this small process requests the signal and then execs. The request survives
the exec and a new session. It works on Linux only; on other systems the program starts without it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Final

__all__ = ["become"]

_PR_SET_PDEATHSIG: Final = 1


def become(parent: int, program: list[str]) -> None:
    """Replace this process by `program`; the kernel kills it when `parent`, the parent process, dies."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:
        # The parent died before the request was made, so no signal will come.
        sys.exit(1)
    os.execvp(program[0], program)  # noqa: S606 - no shell: the arguments are the caller's own


if __name__ == "__main__":
    become(int(sys.argv[1]), sys.argv[2:])
