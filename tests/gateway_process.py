"""A gateway as users start it: `penstock serve` in a process of its own, on a port that was free."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import httpx

from tests.servers import LEAST_PATIENCE_S, ROOT, Process, RedisServer, wait_until

__all__ = ["GatewayProcess"]

_URL = re.compile(r"^Gateway +(\S+)$", re.MULTILINE)
_RPC = re.compile(r"^gRPC +(\S+)$", re.MULTILINE)


class GatewayProcess(Process):
    """`penstock serve --port 0` on a server, with its output kept. `url` and `rpc` are known once it has started."""

    def __init__(
        self, server: RedisServer, folder: Path, *options: str, environment: Mapping[str, str] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder)
        self._options = options
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("PENSTOCK_")},
            "PYTHONPATH": str(ROOT),
            "PENSTOCK_HOME": str(folder / "home"),
            "PENSTOCK_REDIS_URL": server.url,
            "PENSTOCK_INFERENCE_SERVER_GRPC_PORT": "0",
            # Tests that write heads by hand name such hosts.
            "PENSTOCK_INFERENCE_SERVER_ALLOWED_HOSTS": "x,gateway",
            **(environment or {}),
        }
        self.url = ""
        self.rpc = ""
        """The address of gRPC; empty without one."""

    def start(self) -> GatewayProcess:
        """Starts it, and waits until it answers."""
        self._run("penstock", ["serve", "--port", "0", *self._options], self._environment)
        self.url = wait_until(self._listens, 60, "the gateway says where it listens")
        if self.url.startswith("http"):
            wait_until(self.answers, 60, "the gateway answers")
        return self

    def launch(self, *command: str) -> None:
        """Starts a command in its folder and environment, without waiting."""
        self._spawn(command, self._environment)

    def client(self) -> httpx.Client:
        """A client of its URL. Close it."""
        return httpx.Client(base_url=self.url, timeout=LEAST_PATIENCE_S, verify=False)  # noqa: S501 - its own certificate

    def answers(self) -> bool:
        """Whether /health/live answers now."""
        assert self.is_running, self.tail()
        try:
            with self.client() as client:
                return client.get("/health/live").status_code == 200
        except httpx.TransportError:
            return False

    def stop(self) -> None:
        """Kill it, frozen or not."""
        if self._child is not None:
            self.thaw()
            self.kill()

    def _listens(self) -> str:
        assert self.is_running, self.tail()
        text = self.output.read_text()
        found = _URL.search(text)
        self.rpc = rpc[1] if (rpc := _RPC.search(text)) else ""
        return found[1] if found else ""
