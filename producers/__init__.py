"""How work enters: clients that submit inference jobs and read what became of them.

    from producers import Client
    client = Client("redis://localhost:6379/0")
    job = client.submit("minilm", {"text": ["a sentence"]})
    job.result(timeout=30)["embedding"]            # (1, 384) float32

Importing this package imports nothing else: each name is loaded when it is first used, and none needs torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from producers.async_client import AsyncClient, AsyncJobHandle
    from producers.client import Client, JobHandle
    from producers.replies import JobEvent, JobInfo
    from registry.envelope import Retry

__all__ = ["AsyncClient", "AsyncJobHandle", "Client", "JobEvent", "JobHandle", "JobInfo", "Retry"]

_HOMES = {
    "AsyncClient": "producers.async_client",
    "AsyncJobHandle": "producers.async_client",
    "Client": "producers.client",
    "JobEvent": "producers.replies",
    "JobInfo": "producers.replies",
    "JobHandle": "producers.client",
    "Retry": "registry.envelope",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
