"""A door that a package of these tests waits at while it is built."""

from __future__ import annotations

import threading

reached = threading.Event()
may_pass = threading.Event()


def close() -> None:
    """No thread has arrived, and none may pass."""
    reached.clear()
    may_pass.clear()


def wait() -> None:
    """Called by the package."""
    reached.set()
    if not may_pass.wait(180):
        raise TimeoutError("The gate stayed closed. Expected the test to open it within 30 s")
