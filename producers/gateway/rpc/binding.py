"""The port of gRPC, which all processes of one `penstock serve` share.

    RpcBinding -> reserved: the port is free, and stays ours -> RpcBinding with that port -> each process listens on it

The kernel gives each connection to one of the processes (SO_REUSEPORT).
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from penstock.registry.errors import ConfigurationError

__all__ = ["RpcBinding", "reserved"]


class RpcBinding(NamedTuple):
    """Where gRPC listens. TLS: both files, or none."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None

    @property
    def address(self) -> str:
        """host:port."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@contextmanager
def reserved(binding: RpcBinding) -> Iterator[RpcBinding]:
    """Keeps the port for the processes; port 0 becomes a free one. Raises ConfigurationError for a port in use."""
    with _socket(binding) as probe:
        # Without SO_REUSEPORT: two gateways that share a port by accident would answer for each other. Connections
        # that have ended are no hindrance.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _bind(probe, binding, binding.port)
        port: int = probe.getsockname()[1]
    with _socket(binding) as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        _bind(holder, binding, port)
        yield binding._replace(port=port)


def _socket(binding: RpcBinding) -> socket.socket:
    return socket.socket(socket.AF_INET6 if ":" in binding.host else socket.AF_INET)


def _bind(found: socket.socket, binding: RpcBinding, port: int) -> None:
    try:
        found.bind((binding.host, port))
    except OSError as problem:
        raise ConfigurationError(
            f"gRPC cannot listen on {binding.address}: {problem.strerror}. Expected a free address of this machine: "
            "--grpc-port"
        ) from None
