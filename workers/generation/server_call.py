"""One POST to a text server, to an address that may be called: its answer comes as events or as a whole.

    URL -> addresses that may be called -> connection -> request -> status -> events: `data: ...`, `data: [DONE]`
                                                                          `-> the beginning of an error's body

While it reads, it blocks for at most half a second at a time, so that its caller can look whether the job was
cancelled. Looking up a name and connecting take longer. It follows no redirect and uses no proxy.
"""

from __future__ import annotations

import ipaddress
import socket
import ssl
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import h11

from penstock.registry.errors import ConfigurationError, ForwardTimeout, ModelError
from penstock.registry.webhooks.address import AddressRefused, AddressRules

__all__ = ["Refusal", "ServerAddress", "ServerAway", "ServerCall"]

_PORTS: Final = {"http": 80, "https": 443}
_CONNECT_S: Final = 5.0
_SEND_S: Final = 15.0
"""Shorter than the limit of a forward, within which the job must show progress."""
_MOST_ADDRESSES: Final = 3
_LOOK_S: Final = 0.5
_READ_BYTES: Final = 65_536
_MOST_EVENT_BYTES: Final = 1 << 20
_MOST_ERROR_BYTES: Final = 16_384
_BUSY: Final = (429, 502, 503, 504)
_DONE: Final = b"[DONE]"


class ServerAway(Exception):
    """The server takes no connection, is busy, or ended one before its answer was whole: another try may succeed."""


class Refusal(NamedTuple):
    """An answer that is no success: its HTTP status, and the beginning of its body."""

    status: int
    body: bytes


class ServerAddress:
    """Where a server is, and whether it may be called.

    hosts: the setting runtime_hosts. Raises ConfigurationError for one of its entries, and for a URL that names an
    address that may not be called.
    """

    def __init__(self, url: str, hosts: Sequence[str] = ()) -> None:
        parts = urlsplit(url)
        self.netloc: Final = parts.netloc
        self.path: Final = parts.path
        self._host: Final = parts.hostname or ""
        self._port: Final = parts.port or _PORTS[parts.scheme]
        self._tls: Final = ssl.create_default_context() if parts.scheme == "https" else None
        self._rules: Final = AddressRules(hosts, setting="runtime_hosts", takes_public=False)
        with suppress(ValueError):
            self._check(str(ipaddress.ip_address(self._host)))

    def connect(self) -> Generator[None, None, socket.socket]:
        """Yields before each address that it tries. Raises ServerAway, and ConfigurationError for addresses that may
        not be called.
        """
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            raise ServerAway("its name has no address") from None
        # The connection goes to an address of this very answer: a second answer of the name's server decides nothing.
        problem = "it has no address"
        allowed = self._check(*dict.fromkeys(str(place[0]) for *_, place in found))
        for address in allowed[:_MOST_ADDRESSES]:
            yield
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


class ServerCall:
    """One request. close: at any time; the server sees that the connection ends.

    silence_s: so long it may send nothing.
    """

    def __init__(self, address: ServerAddress, silence_s: float) -> None:
        self._address: Final = address
        self._silence_s: Final = silence_s
        self._http: Final = h11.Connection(h11.CLIENT)
        self._socket: socket.socket | None = None

    def post(self, path: str, headers: Mapping[str, str], body: bytes) -> Iterator[bytes | Refusal | None]:
        """The data of each event of the answer, without [DONE], and None where there is none for a while.

        A single Refusal: the server refused. Raises ServerAway, and ForwardTimeout after `silence_s` without a byte.
        """
        self._socket = yield from self._address.connect()
        fields = [("host", self._address.netloc), *headers.items(), ("content-length", str(len(body)))]
        try:
            request = h11.Request(method="POST", target=self._address.path + path, headers=fields)
        except h11.LocalProtocolError:
            # Its message shows the field, which may be the key.
            raise ModelError("The request to the text server has a field that HTTP does not allow") from None
        parts = [self._http.send(request), self._http.send(h11.Data(data=body)), self._http.send(h11.EndOfMessage())]
        self._socket.settimeout(_SEND_S)
        try:
            self._socket.sendall(b"".join(part or b"" for part in parts))
            self._socket.settimeout(_LOOK_S)
            yield from self._answer()
        except ForwardTimeout:
            # It is an OSError, too.
            raise
        except h11.RemoteProtocolError:
            raise ServerAway("it ended its answer before it was whole") from None
        except OSError as error:
            raise ServerAway(error.strerror or type(error).__name__) from None

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()

    def _answer(self) -> Iterator[bytes | Refusal | None]:
        status, waiting = 0, b""
        for event in self._events():
            if isinstance(event, h11.Response):
                status = event.status_code
                if status in _BUSY:
                    raise ServerAway(f"it answered {status}")
            elif isinstance(event, h11.Data):
                waiting += bytes(event.data)
                if status != 200:
                    waiting = waiting[:_MOST_ERROR_BYTES]
                    continue
                *lines, waiting = waiting.split(b"\n")
                for line in lines:
                    name, _, value = line.rstrip(b"\r").partition(b":")
                    if name == b"data":
                        if value.strip() == _DONE:
                            return
                        yield value
                if len(waiting) > _MOST_EVENT_BYTES:
                    raise ModelError("The text server sent an event that is too large. Expected chunks of text")
            elif event is None:
                yield None
        if status == 200:
            raise ServerAway("it ended its answer before [DONE]")
        yield Refusal(status, waiting)

    def _events(self) -> Iterator[h11.Response | h11.Data | None]:
        """What the server sends, to the end of its answer; None where it sends nothing for a while."""
        silent_at = time.monotonic() + self._silence_s
        while not isinstance(event := self._http.next_event(), h11.EndOfMessage | h11.ConnectionClosed):
            if event is not h11.NEED_DATA:
                if isinstance(event, h11.Response | h11.Data):
                    yield event
                continue
            try:
                found = self._socket.recv(_READ_BYTES) if self._socket is not None else b""
            except TimeoutError:
                if time.monotonic() > silent_at:
                    raise ForwardTimeout(
                        f"The text server sent nothing for {self._silence_s:g} s (generate.runtime_timeout_s)"
                    ) from None
                yield None
                continue
            silent_at = time.monotonic() + self._silence_s
            self._http.receive_data(found)
