"""The disk of PENSTOCK_HOME: what keeps this user from writing there, before a program fails half-way.

The checks change nothing: they look at the folder, or at the nearest one above it that exists.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

__all__ = ["free_bytes", "home_problem"]

LEAST_BYTES: Final = 16 << 20
"""Keys, locks, the registry and the logs of a start fit into this. Redis needs more as jobs come."""


def home_problem(home: Path, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs) -> str:
    """Why this user cannot write into the folder, with what is expected; empty when all is well."""
    try:
        folder = _nearest(home)
        if not folder.is_dir():
            at = "is a file" if folder == home else "lies below a file"
            return f"PENSTOCK_HOME {at}. Expected a folder that this user may write to"
        if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
            return "PENSTOCK_HOME cannot be written to by this user. Expected a folder that this user may write to"
        free = free_bytes(folder, statvfs)
    except OSError as error:
        return f"PENSTOCK_HOME cannot be read ({error.strerror}). Expected a folder that this user may write to"
    if free < LEAST_BYTES:
        return (
            f"The disk of PENSTOCK_HOME is full: {free / 1048576:,.0f} MiB free. Expected at least "
            f"{LEAST_BYTES >> 20} MiB"
        )
    return ""


def free_bytes(folder: Path, statvfs: Callable[[Path], os.statvfs_result] = os.statvfs) -> int:
    """The bytes that this user may still write; 0 when no file can be made, although there is room."""
    found = statvfs(folder)
    # Some file systems count no files: both figures are 0 there.
    return 0 if found.f_files and not found.f_favail else found.f_bavail * found.f_frsize


def _nearest(path: Path) -> Path:
    """The path, or the nearest one above it that exists. Raises OSError when a folder above cannot be entered."""
    for each in (path, *path.parents):
        try:
            each.lstat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        return each
    return path
