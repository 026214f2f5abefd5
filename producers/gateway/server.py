"""uvicorn with what it lacks: a time-out for clients that do not send a whole head, and answers in one write.

    settings -> Config -> one process, or a supervisor with N -> TimedProtocol, TimedWebSocket -> application.py
                                                     head and body of an answer -> TurnTransport -> one write

Processes share the listening socket. One that dies is started again by the supervisor.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import shutil
import signal
import socket
import ssl
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import uvicorn
from prometheus_client.multiprocess import mark_process_dead
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.supervisors import Multiprocess

from penstock.producers.gateway.application import Gateway
from penstock.producers.gateway.rpc.binding import RpcBinding, reserved
from penstock.registry.errors import ConfigurationError
from penstock.registry.settings_sections import InferenceConfig

__all__ = ["Binding", "TimedProtocol", "TimedWebSocket", "listening", "serve", "uvicorn_options"]


class Binding(NamedTuple):
    """Where to listen. uds: a socket in the file system, in place of host and port. TLS: both files, or none.

    grpc_port: of gRPC, on the same host; None: no gRPC.
    """

    host: str
    port: int
    uds: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    grpc_port: int | None = None


class TurnTransport:
    """A transport that sends what was written in one turn of the loop together.

    uvicorn writes the head and the body of an answer apart. Each write is a call of the kernel, which wakes the client.
    """

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._call_soon = loop.call_soon
        self._parts: list[bytes] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Sends the bytes at the end of this turn."""
        if not self._parts:
            self._call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        """Sends what was written, and closes."""
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if parts := self._parts:
            self._parts = []
            self._transport.write(b"".join(parts))


class TimedProtocol(HttpToolsProtocol):
    """One connection. It is closed when a head, or the client's reading of an answer, takes too long.

    The time is that of idle connections.
    """

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The first head must come now."""
        super().connection_made(cast(asyncio.Transport, TurnTransport(transport, self.loop)))
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """What comes behind an answer must become a whole head in time, too. uvicorn's own timer of idle connections
        ends with the first byte, which may be an empty line, or a part of a body that nobody reads.
        """
        super().data_received(data)
        if (self.cycle is None or self.cycle.response_complete) and self in self.connections:
            self._await_head()

    def on_message_begin(self) -> None:
        """A further head has begun on a connection that was kept."""
        super().on_message_begin()
        self._await_head()

    def on_headers_complete(self) -> None:
        """The head is there; for the body, the application has a time-out."""
        self._forget_timer()
        super().on_headers_complete()
        if not self.parser.should_upgrade():
            # The fields of a trailer come here, too. As headers they would override those that a proxy has checked.
            self.headers = []

    def pause_writing(self) -> None:
        """The client takes its answer slower than it is made: now it has a time."""
        super().pause_writing()
        self._write_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def resume_writing(self) -> None:
        """It has taken most of it."""
        self._forget_write_timer()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._forget_timer()
        self._forget_write_timer()
        super().connection_lost(exc)

    def _await_head(self) -> None:
        if self._head_timer is None and self.timeout_keep_alive_task is None:
            self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._give_up)

    def _give_up(self) -> None:
        self._head_timer = self._write_timer = None
        # Also one that is closing: it waits for its client, too.
        self.transport.abort()

    def _forget_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _forget_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class ImpatientTransport:
    """A transport that waits only so long for its client, once it is closed."""

    def __init__(self, transport: Any, loop: asyncio.AbstractEventLoop, timeout_s: float) -> None:
        self._transport = transport
        self._call_later = loop.call_later
        self._timeout_s = timeout_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        """Closes once the client has taken what was written, and after the time in any case."""
        self._transport.close()
        self._call_later(self._timeout_s, self._transport.abort)


class TimedWebSocket(WebSocketsSansIOProtocol):
    """One WebSocket. It is closed when its client takes too long to answer a ping, or to read.

    While the client does not read, nothing is read of it: it cannot make answers to its pings pile up.
    """

    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """The transport is that of the HTTP request."""
        impatient = ImpatientTransport(transport, self.loop, self.config.timeout_keep_alive)
        super().connection_made(cast(asyncio.Transport, impatient))

    def pause_writing(self) -> None:
        """The client reads slower than messages are made: now it has a time."""
        super().pause_writing()
        self.transport.pause_reading()
        self._write_timer = self.loop.call_later(self.config.timeout_keep_alive, self.transport.abort)

    def resume_writing(self) -> None:
        """It has taken most of them."""
        self._forget_timer()
        if not self.read_paused:
            self.transport.resume_reading()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        self._forget_timer()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server stops. The application ends what it has accepted, with a reason and after the open requests."""
        if not self.handshake_complete or self.close_sent:
            super().shutdown()

    def _forget_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def serve(inference: InferenceConfig, binding: Binding, on_listen: Callable[[str, str], None]) -> None:
    """Serves until SIGTERM or SIGINT. The processes read their settings from the environment.

    on_listen: called with the URL, and with the address of gRPC or nothing; both have the port that was chosen for port
    0. Raises ConfigurationError for an address that cannot be used.
    """
    with listening(binding) as (listener, rpc, url):
        on_listen(url, "" if rpc is None else rpc.address)
        # Each process gets the gateway before it is used, and it opens nothing before its startup.
        config = _Config(Gateway(rpc=rpc, owns_process=True), **uvicorn_options(inference, binding))
        if inference.server.workers == 1:
            uvicorn.Server(config).run([listener])
        else:
            with _metrics_folder():
                _Supervisor(config, [listener]).run()


class _Supervisor(Multiprocess):
    """uvicorn's, which also deletes the gauges of processes that it has replaced or ended."""

    def __init__(self, config: uvicorn.Config, sockets: list[socket.socket]) -> None:
        super().__init__(config, sockets)
        self._pids: set[int] = set()

    def keep_subprocess_alive(self) -> None:
        """See uvicorn, which calls it twice a second, behind the signals that replace or end processes."""
        # A process may die before the first call has ended.
        before = self._pids | self._present()
        super().keep_subprocess_alive()
        self._pids = self._present()
        for pid in before - self._pids:
            # It has been waited for. Its gauges would be added up for ever: nobody else knows that it has gone.
            mark_process_dead(pid)  # type: ignore[no-untyped-call]

    def _present(self) -> set[int]:
        return {process.pid for process in self.processes if process.pid is not None}


class _Config(uvicorn.Config):
    """Each process loads it when it starts. One that a supervisor has started ends with it, also by kill -9."""

    def load(self) -> None:
        """See uvicorn."""
        if (supervisor := multiprocessing.parent_process()) is not None:
            threading.Thread(target=_end_after, args=(supervisor,), name="supervisor", daemon=True).start()
        super().load()


def _end_after(supervisor: Any) -> None:
    supervisor.join()
    os.kill(os.getpid(), signal.SIGTERM)


@contextmanager
def _reserved(binding: Binding) -> Iterator[RpcBinding | None]:
    if binding.grpc_port is None:
        yield None
        return
    with reserved(RpcBinding(binding.host, binding.grpc_port, binding.certificate, binding.key)) as rpc:
        yield rpc


@contextmanager
def listening(binding: Binding) -> Iterator[tuple[socket.socket, RpcBinding | None, str]]:
    """The socket of HTTP, where gRPC will listen, and the URL. Raises ConfigurationError; see serve."""
    _check_tls(binding)
    with _bound(binding) as listener, _reserved(binding) as rpc:
        yield listener, rpc, _url(binding, listener)


def _check_tls(binding: Binding) -> None:
    """Raises ConfigurationError for files that no server can use: each process would end with a traceback."""
    if binding.certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(binding.certificate, binding.key, _leave_to_server)
    except _HasPassphrase:
        return
    except OSError as problem:
        reason = problem.strerror
        if isinstance(problem, ssl.SSLError):
            # OpenSSL names no reason for a text that it cannot read.
            reason = problem.reason.replace("_", " ").lower() if problem.reason else "a file is not in PEM"
        raise ConfigurationError(
            f"The gateway cannot use its certificate and key for TLS: {reason}. Expected a certificate in PEM and its "
            "own key"
        ) from None


class _HasPassphrase(Exception):
    """The key for TLS is encrypted: the server asks for the passphrase."""


def _leave_to_server() -> str:
    raise _HasPassphrase


def uvicorn_options(inference: InferenceConfig, binding: Binding) -> Mapping[str, Any]:
    """The arguments of uvicorn.Config beside the application."""
    server = inference.server
    return {
        "ssl_certfile": binding.certificate,
        "ssl_keyfile": binding.key,
        "workers": server.workers,
        "http": TimedProtocol,
        "ws": TimedWebSocket,
        "ws_max_size": inference.max_request_size_mb * 1024 * 1024,
        "ws_ping_interval": server.client_timeout_s,
        "ws_ping_timeout": server.client_timeout_s,
        # Tensors hardly get smaller, and each connection would hold two windows.
        "ws_per_message_deflate": False,
        # The addresses of clients are not used.
        "proxy_headers": False,
        "loop": "uvloop",
        "lifespan": "on",
        "access_log": inference.uvicorn_access_log,
        "log_level": "info" if inference.uvicorn_access_log else "warning",
        "server_header": False,
        # Both go to timers, which take fractions of a second.
        "timeout_keep_alive": server.client_timeout_s,
        "timeout_graceful_shutdown": server.stop_grace_s,
        # A process that starts on a busy machine answers late. uvicorn would kill it after 5 s, and start another one.
        "timeout_worker_healthcheck": 20,
    }


@contextmanager
def _bound(binding: Binding) -> Iterator[socket.socket]:
    if binding.uds is not None:
        listener, address = socket.socket(socket.AF_UNIX), str(binding.uds)
    else:
        listener = socket.socket(socket.AF_INET6 if ":" in binding.host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        address = f"{binding.host}:{binding.port}"
    with listener:
        try:
            if binding.uds is not None:
                _remove_stale(binding.uds)
                listener.bind(address)
            else:
                listener.bind((binding.host, binding.port))
        except OSError as problem:
            # The module itself refuses a path that is too long, without a number of an error.
            raise ConfigurationError(
                f"The gateway cannot listen on {address}: {problem.strerror or problem}. Expected a free address of "
                "this machine"
            ) from None
        listener.set_inheritable(True)
        try:
            yield listener
        finally:
            if binding.uds is not None:
                binding.uds.unlink(missing_ok=True)


def _remove_stale(path: Path) -> None:
    """Removes the socket of a process that was killed. One that answers stays, and binding to it fails.

    A file of another kind stays, too: it refuses a connection in the same way.
    """
    if not path.is_socket():
        return
    with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError):
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)


def _url(binding: Binding, listener: socket.socket) -> str:
    if binding.uds is not None:
        return f"unix:{binding.uds}"
    host, port = listener.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    return f"{'http' if binding.certificate is None else 'https'}://{shown}:{port}"


@contextmanager
def _metrics_folder() -> Iterator[None]:
    """A folder for the figures of all processes, unless the environment names one."""
    if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
        yield
        return
    folder = tempfile.mkdtemp(prefix="penstock-metrics-")
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = folder
    try:
        yield
    finally:
        del os.environ["PROMETHEUS_MULTIPROC_DIR"]
        shutil.rmtree(folder, ignore_errors=True)
