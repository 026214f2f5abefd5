"""Where a text server is -> a connection to an address that may be called.

    connect: a thread of its own: name -> addresses -> those that may be called -> TCP, TLS -> socket
             the job's thread looks twice a second, and gives the attempt up after a limit

A name server may take half a minute, and nothing can interrupt a look-up. So it happens on a thread that no job is on:
its job shows progress meanwhile, and the worker's process is not replaced.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from typing import Final
from urllib.parse import urlsplit

from penstock.registry.errors import ConfigurationError, ModelError
from penstock.registry.webhooks.address import AddressRefused, AddressRules

__all__ = ["LookUp", "ServerAddress", "ServerAway", "look_up"]

LookUp = Callable[[str, int], Sequence[str]]
"""(host, port) -> addresses. Raises OSError, and UnicodeError for what is no name."""
_PORTS: Final = {"http": 80, "https": 443}
_LIMIT_S: Final = 10.0
"""Of a look-up and a connection together."""
_CONNECT_S: Final = 5.0
"""Of one address."""
_LOOK_S: Final = 0.5
_MOST_ADDRESSES: Final = 3
_MOST_ATTEMPTS: Final = 64
"""Whose threads have not ended: attempts that were given up may hang for long."""


class ServerAway(Exception):
    """The server takes no connection, is busy, or ended one before its answer was whole: another try may succeed."""


def look_up(host: str, port: int) -> list[str]:
    """The addresses of a name, each once."""
    return [*dict.fromkeys(str(place[0]) for *_, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))]


class ServerAddress:
    """Where a server is, and whether it may be called. For any thread.

    hosts: the setting runtime_hosts. Raises ConfigurationError for one of its entries, and for a URL that names an
    address that may not be called.
    """

    def __init__(self, url: str, hosts: Sequence[str] = (), look_up: LookUp = look_up) -> None:
        parts = urlsplit(url)
        self.netloc: Final = parts.netloc
        self.path: Final = parts.path
        self._host: Final = parts.hostname or ""
        self._port: Final = parts.port or _PORTS[parts.scheme]
        self._tls: Final = ssl.create_default_context() if parts.scheme == "https" else None
        self._rules: Final = AddressRules(hosts, setting="runtime_hosts", takes_public=False)
        self._look_up: Final = look_up
        self._attempts: Final = threading.Semaphore(_MOST_ATTEMPTS)
        with suppress(ValueError):
            self._check(str(ipaddress.ip_address(self._host)))

    def connect(self, limit_s: float = _LIMIT_S) -> Generator[None, None, socket.socket]:
        """Yields twice a second while its thread works. Ten seconds are the limit, and `limit_s` where that is less.

        Raises ServerAway, ConfigurationError for addresses that may not be called, and ModelError for a certificate
        that is not valid.
        """
        if not self._attempts.acquire(blocking=False):
            raise ServerAway(f"{_MOST_ATTEMPTS} earlier attempts still wait for its address or its connection")
        attempt = _Attempt(self._open)
        threading.Thread(target=self._run, args=(attempt,), name="text-server", daemon=True).start()
        return (yield from attempt.wait(min(limit_s, _LIMIT_S)))

    def _run(self, attempt: _Attempt) -> None:
        try:
            attempt.run()
        finally:
            self._attempts.release()

    def _open(self, attempt: _Attempt) -> socket.socket:
        try:
            found = self._look_up(self._host, self._port)
        except (OSError, UnicodeError):
            raise ServerAway("its name has no address") from None
        # The connection goes to an address of this very answer: a second answer of the name's server decides nothing.
        allowed = self._check(*found)
        attempt.is_found = True
        problem = "it has no address"
        for address in allowed[:_MOST_ADDRESSES]:
            try:
                return self._connected(address)
            except ssl.SSLCertVerificationError as error:
                raise ModelError(f"The certificate of the text server is not valid: {error.verify_message}") from None
            except OSError as error:
                problem = error.strerror or type(error).__name__
        raise ServerAway(problem)

    def _connected(self, address: str) -> socket.socket:
        plain = socket.create_connection((address, self._port), _CONNECT_S)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                return plain
            return self._tls.wrap_socket(plain, server_hostname=self._host)
        except BaseException:
            plain.close()
            raise

    def _check(self, *addresses: str) -> list[str]:
        try:
            return self._rules.select(self._host, addresses)
        except AddressRefused as refused:
            raise ConfigurationError(f"generate.runtime_url: {refused}") from None


class _Attempt:
    """A connection that one thread opens and another waits for. A connection that comes too late is closed."""

    def __init__(self, open_: Callable[[_Attempt], socket.socket]) -> None:
        self.is_found = False
        """Whether the look-up has ended."""
        self._is_given_up = False
        self._open: Final = open_
        self._lock: Final = threading.Lock()
        self._ended: Final = threading.Event()
        self._socket: socket.socket | None = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Opens it."""
        try:
            found = self._open(self)
        except BaseException as error:  # the thread that waits raises it
            self._error = error
        else:
            with self._lock:
                if self._is_given_up:
                    found.close()
                self._socket = found
        self._ended.set()

    def wait(self, limit_s: float) -> Generator[None, None, socket.socket]:
        """Yields twice a second. Raises what `run` has met, and ServerAway after the limit."""
        give_up_at = time.monotonic() + limit_s
        try:
            while not self._ended.wait(max(0.0, min(_LOOK_S, give_up_at - time.monotonic()))):
                if time.monotonic() >= give_up_at:
                    told = "it took no connection" if self.is_found else "its name was not resolved"
                    raise ServerAway(f"{told} within {limit_s:g} s")
                yield
        except BaseException:
            self._give_up()
            raise
        if self._error is not None:
            raise self._error
        if self._socket is None:
            raise ServerAway("it has no connection")
        return self._socket

    def _give_up(self) -> None:
        with self._lock:
            self._is_given_up = True
            if self._socket is not None:
                self._socket.close()
