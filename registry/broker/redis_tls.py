"""TLS on one side only: found out in less than a second, by asking the port itself.

rediss:// to a port without TLS   the handshake would wait for its time-out: after 0.4 s the port is asked without TLS
redis:// to a port with TLS       the server hangs up: the port is asked whether it answers a TLS handshake
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import Any, Final

import redis
import redis.asyncio

__all__ = ["AsyncTlsConnection", "ServerWithoutTls", "TlsConnection", "answers_plainly", "answers_tls"]

_FIRST_HANDSHAKE_S: Final = 0.4
"""The first try. A slow network has the whole time-out in the second one."""
_PROBE_S: Final = 0.4


class ServerWithoutTls(redis.ConnectionError):
    """The port answered without TLS."""


class TlsConnection(redis.SSLConnection):
    """A connection of redis-py that notices a server without TLS. Raises ServerWithoutTls."""

    _handshake_s: float | None = _FIRST_HANDSHAKE_S

    def _connect(self) -> Any:
        patience_s = self.socket_connect_timeout
        self._handshake_s = _FIRST_HANDSHAKE_S if patience_s is None else min(patience_s, _FIRST_HANDSHAKE_S)
        # redis-py leaves these methods untyped.
        connect: Any = super()._connect
        try:
            return connect()
        except TimeoutError:
            if answers_plainly(self.host, self.port):
                raise ServerWithoutTls from None
        self._handshake_s = patience_s
        return connect()

    def _wrap_socket_with_ssl(self, sock: socket.socket) -> Any:
        sock.settimeout(self._handshake_s)
        wrap: Any = super()._wrap_socket_with_ssl
        wrapped = wrap(sock)
        wrapped.settimeout(self.socket_timeout)
        return wrapped


class AsyncTlsConnection(redis.asyncio.SSLConnection):
    """The same for asyncio."""

    async def _connect(self) -> None:
        patience_s = self.socket_connect_timeout
        self.socket_connect_timeout = _FIRST_HANDSHAKE_S if patience_s is None else min(patience_s, _FIRST_HANDSHAKE_S)
        connect: Any = super()._connect
        try:
            await connect()
            return
        except TimeoutError:
            if await asyncio.to_thread(answers_plainly, self.host, self.port):
                raise ServerWithoutTls from None
        finally:
            self.socket_connect_timeout = patience_s
        await connect()


def answers_plainly(host: str, port: int) -> bool:
    """Whether a Redis without TLS listens there: it answers a PING, by a refusal, too."""
    with suppress(OSError), socket.create_connection((host, port), _PROBE_S) as probe:
        probe.sendall(b"PING\r\n")
        return probe.recv(1) in (b"+", b"-")
    return False


def answers_tls(host: str, port: int) -> bool:
    """Whether a server with TLS listens there: it answers a handshake, by a refusal, too."""
    # Nothing is sent but the handshake, so the certificate does not matter.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), _PROBE_S) as probe, context.wrap_socket(probe):
            return True
    except ssl.SSLError as error:
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
