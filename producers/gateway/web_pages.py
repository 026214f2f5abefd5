"""Which pages of a browser may call: any page can send requests to any host, the loopback included.

    POST, DELETE, WebSocket + Origin -> that of the gateway itself, or one of server.allowed_origins; else 403
    no API key                       -> Host is a name of the loopback, or one of server.allowed_hosts; else 403

The second check is against DNS rebinding: a page of evil.example whose name leads to 127.0.0.1 has the gateway's own
origin, and its Host is evil.example. On another address than the loopback it needs server.allowed_hosts. Where callers
need a key, such a page has none.
"""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address
from typing import Final

from penstock.producers.gateway.exchange import Exchange, RequestRefused
from penstock.registry.settings_sections import ServerConfig

__all__ = ["WebPages"]

_ANY: Final = "*"
_SAFE_METHODS: Final = frozenset({"GET", "HEAD"})


class WebPages:
    """The checks of one process."""

    def __init__(self, server: ServerConfig) -> None:
        self._origins = frozenset(server.allowed_origins)
        self._hosts = frozenset({server.host.lower(), *(name.lower() for name in server.allowed_hosts)})
        self._names_hosts = bool(server.allowed_hosts)
        self._is_allowed_host = lru_cache(maxsize=64)(self._find_host)

    def check_origin(self, exchange: Exchange, *, is_websocket: bool = False) -> None:
        """Raises RequestRefused for a request of another origin's page that may change something."""
        raw = exchange.headers.get(b"origin")
        if raw is None or (exchange.method in _SAFE_METHODS and not is_websocket):
            return
        origin = raw.decode("latin-1")
        if _ANY in self._origins or origin in self._origins:
            return
        if origin.partition("://")[2] != exchange.header(b"host"):
            raise RequestRefused(403, "A page of another origin. Expected one of server.allowed_origins")

    def check_host(self, exchange: Exchange, *, is_exposed: bool) -> None:
        """Raises RequestRefused for a Host that is no name of this machine. Browsers always send one.

        is_exposed: other machines can connect, by names that only the settings can tell.
        """
        if is_exposed and not self._names_hosts:
            return
        raw, server = exchange.headers.get(b"host"), exchange.scope.get("server")
        # Without an address of its own the server listens on a socket in the file system, which no browser reaches.
        if raw is not None and server is not None and not self._is_allowed_host(raw, server[0]):
            raise RequestRefused(
                403,
                "Another Host than one of the loopback. Expected localhost, its address, one of server.allowed_hosts, "
                "or an API key",
            )

    def _find_host(self, raw: bytes, address: str) -> bool:
        """address: where the connection came to; a name where an application calls the gateway in its own process."""
        host = _without_port(raw.decode("latin-1").lower())
        if host in self._hosts or _ANY in self._hosts or host in ("localhost", address) or host.endswith(".localhost"):
            return True
        try:
            return ip_address(host).is_loopback
        except ValueError:
            return False


def _without_port(host: str) -> str:
    """`127.0.0.1:8000` -> `127.0.0.1`; `[::1]:8000` -> `::1`."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
