"""A deliverer of webhooks as users start it: `penstock webhooks run` in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tests.servers import ROOT, Process, RedisServer

__all__ = ["DelivererProcess"]


class DelivererProcess(Process):
    """It calls receivers on the loopback, and signs with `secret`."""

    def __init__(
        self, server: RedisServer, folder: Path, secret: str, *, environment: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir()
        super().__init__(folder)
        self._environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_HOME": str(folder / "home"),
            "PENSTOCK_REDIS_URL": server.url,
            "PENSTOCK_WEBHOOK_SECRETS": secret,
            "PENSTOCK_INFERENCE_WEBHOOKS_ALLOW": "127.0.0.1",
            **(environment or {}),
        }

    def launch(self) -> None:
        """Start it without waiting."""
        self._run("penstock", ["webhooks", "run"], self._environment)
