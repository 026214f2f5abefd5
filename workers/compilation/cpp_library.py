"""The C++ compiler of a build, made to link the C++ library that this process has.

Where a machine has only the static C++ library, a compiler copies it into the code that it makes. Then the process has
two of them, which disagree about locales: the first regular expression of torch's runtime ended the process, or raised
`std::bad_cast` (torch 2.11 with CUDA 13, and torch 2.13 on a CPU with `-static-libstdc++`).

    compiler, asked for its shared library -> has one: nothing to do
                                           -> has none: a script in its place, which finds the library that is loaded
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

__all__ = ["shared_library_environment"]

_LIBRARY: Final = "libstdc++.so"
_ASKED_S: Final = 30.0


def shared_library_environment(folder: Path, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for a build: CXX, a script in this folder, or nothing where the compiler needs no help."""
    compiler = environment.get("CXX") or "g++"
    loaded = _loaded_library()
    if loaded is None or _has_shared_library(compiler):
        return {}
    (folder / _LIBRARY).symlink_to(loaded)
    script = folder / "c++"
    script.write_text(f'#!/bin/sh\nexec {compiler} -L{shlex.quote(str(folder))} "$@"\n')
    script.chmod(0o700)
    return {"CXX": str(script)}


def _has_shared_library(compiler: str) -> bool:
    """Also where nobody knows: a build says by itself that there is no compiler."""
    command = [*shlex.split(compiler), f"-print-file-name={_LIBRARY}"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=_ASKED_S, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return True
    # A compiler that has no such file answers with its bare name.
    return Path(answer).is_absolute()


def _loaded_library() -> Path | None:
    """The file of the C++ library of this process, once torch is imported."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    files = {Path(line.split(maxsplit=5)[-1]) for line in lines if f"/{_LIBRARY}." in line}
    return next((file for file in sorted(files) if file.is_file()), None)
