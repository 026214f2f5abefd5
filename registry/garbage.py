"""The garbage collector of a process of ours: seldom during imports, and without what they made afterwards.

start of the process -> collect_seldom -> imports, loads -> freeze -> jobs
"""

from __future__ import annotations

import gc
from typing import Final

__all__ = ["collect_seldom", "freeze"]

_COLLECT_AFTER: Final = 10_000


def collect_seldom() -> None:
    """Look for garbage after 10,000 new containers instead of 700.

    An import of PyTorch and transformers makes half a million that stay. To look through them again and again took a
    sixth of a worker's CPU time until it was ready.
    """
    gc.set_threshold(_COLLECT_AFTER, 10, 10)


def freeze() -> None:
    """Exclude all objects that there are from every collection from now on.

    Jobs allocate a few thousand containers a second and free them by reference count. With the default thresholds the
    full collections that they trigger took a sixth of the worker's time per job.
    """
    gc.collect()
    gc.freeze()
    collect_seldom()
