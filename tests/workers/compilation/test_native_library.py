"""Calls of a compiled library beyond its instances."""

from __future__ import annotations

import ctypes
import threading
from typing import Any

import pytest

from penstock.workers.compilation.native_library import NativeLibrary


def test_calls_beyond_the_instances_wait_outside_of_the_library(monkeypatch: pytest.MonkeyPatch):
    """In there, torch wakes none of them when another one fails. Operators may raise `concurrency` at any time."""
    library = NativeLibrary.__new__(NativeLibrary)
    library._places, library._outputs = threading.BoundedSemaphore(2), 0
    library._container = ctypes.c_void_p()
    seen: list[tuple[str, bool]] = []

    def run(_library: NativeLibrary, function: str, *_: Any) -> None:
        # One place is taken for this call, the other one below.
        seen.append((function, library._places.acquire(blocking=False)))
        raise RuntimeError(f"{function} failed in compiled code")

    monkeypatch.setattr(NativeLibrary, "_do", run)
    with library._places:
        for _ in range(3):
            with pytest.raises(RuntimeError, match="Run failed in compiled code"):
                library.run([])
    assert seen == [("Run", False)] * 3
    assert library._places.acquire(blocking=False)
    assert library._places.acquire(blocking=False)
