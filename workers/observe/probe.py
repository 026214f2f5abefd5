"""The worker's HTTP endpoint for monitors: metrics, health and a snapshot. It only reads.

    /metrics        Prometheus text, or OpenMetrics when the Accept header asks for it
    /health/live    200 while the process answers
    /health/ready   200 or 503, with the reasons as JSON
    /snapshot       InferenceMetrics.snapshot() as JSON

On an address other than loopback, every path requires the bearer token.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final, TypeAlias

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder

from penstock.registry.bearer_file import presents, read_bearer
from penstock.registry.errors import ConfigurationError
from penstock.workers import children
from penstock.workers.observe.metrics import InferenceMetrics

__all__ = ["Probe", "ReadinessCheck"]

ReadinessCheck: TypeAlias = Callable[[], tuple[bool, Mapping[str, Any]]]
"""Returns whether the worker takes jobs, and the facts behind this answer."""

_Respond: TypeAlias = Callable[[str, str], tuple[HTTPStatus, str, bytes]]
"""(path, Accept header) -> (status, content type, body)."""
_POLL_S: Final = 0.1
"""The listening thread notices a stop within this time."""
_JSON: Final = "application/json"
logger = logging.getLogger("penstock.server")


class Probe:
    """Serves on `host`:`port` from start() to stop(). Port 0 takes a free port, which `port` then holds."""

    def __init__(
        self,
        metrics: InferenceMetrics,
        readiness: ReadinessCheck,
        *,
        host: str = "127.0.0.1",
        port: int,
        bearer_file: Path | None = None,
    ) -> None:
        self.port = port
        self._host: Final = host
        self._metrics: Final = metrics
        self._readiness: Final = readiness
        self._bearer_file: Final = bearer_file
        self._registry: Final = CollectorRegistry()
        self._server: _Server | None = None

    def start(self) -> None:
        """Listen. Raises ConfigurationError for a port in use, and without a token beyond loopback."""
        token = read_bearer(self._bearer_file)
        if not token and not _is_loopback(self._host):
            raise ConfigurationError(
                f"Metrics on {self._host} would be open to the network. "
                "Expected a loopback address, or a token in the file that PENSTOCK_METRICS_BEARER_FILE names"
            )
        self._server = self._listen(token)
        children.own(self._server.fileno())
        self.port = self._server.server_address[1]
        self._registry.register(self._metrics)
        ProcessCollector(registry=self._registry)
        threading.Thread(target=self._server.serve_forever, args=(_POLL_S,), name="probe", daemon=True).start()

    def stop(self) -> None:
        """Stop listening. The port is free when this returns."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def refresh(self) -> None:
        """Bring the metrics up to date, before they are read."""
        self._metrics.ready_now(self._readiness()[0])

    def _listen(self, token: str) -> _Server:
        try:
            return _Server((self._host, self.port), self._respond, token)
        except OSError as problem:
            is_taken = problem.errno == errno.EADDRINUSE
            reason = "is in use" if is_taken else f"cannot be used: {problem.strerror}"
        raise ConfigurationError(
            f"Metrics port {self.port} on {self._host} {reason}. "
            "Expected a free one in PENSTOCK_METRICS_PORT; 0 takes any"
        )

    def _respond(self, path: str, accept: str) -> tuple[HTTPStatus, str, bytes]:
        if path in ("/metrics", "/snapshot"):
            self.refresh()
        if path == "/metrics":
            encode, content_type = choose_encoder(accept)
            return HTTPStatus.OK, content_type, encode(self._registry)
        if path == "/health/live":
            return _as_json(HTTPStatus.OK, {"live": True})
        if path == "/health/ready":
            is_ready, facts = self._readiness()
            status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
            return _as_json(status, {**facts, "ready": is_ready})
        if path == "/snapshot":
            return _as_json(HTTPStatus.OK, self._metrics.snapshot())
        return _as_json(HTTPStatus.NOT_FOUND, {"error": "Expected /metrics, /health/live, /health/ready or /snapshot"})


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], respond: _Respond, token: str) -> None:
        self.respond: Final = respond
        self.token: Final = token
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        # HTTPServer's own method asks the resolver for the name of this host, which can take seconds.
        socketserver.TCPServer.server_bind(self)

    def handle_error(self, request: object, client_address: object) -> None:
        logger.exception("probe request failed")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10
    """Seconds until a silent client is disconnected."""

    def do_GET(self) -> None:
        if not self._is_allowed():
            status, content_type, body = _as_json(HTTPStatus.UNAUTHORIZED, {"error": "Expected a bearer token"})
        else:
            status, content_type, body = self.server.respond(
                self.path.partition("?")[0], self.headers.get("Accept", "")
            )
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("probe: " + format, *args)

    def _is_allowed(self) -> bool:
        token = self.server.token
        return not token or presents(self.headers.get("Authorization", ""), token)


def _as_json(status: HTTPStatus, content: Mapping[str, Any]) -> tuple[HTTPStatus, str, bytes]:
    return status, _JSON, json.dumps(content, default=str).encode()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
