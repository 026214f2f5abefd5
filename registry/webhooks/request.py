"""One POST to a receiver, with time-outs, to an address that may be called. It follows no redirect and uses no proxy.

URL --> addresses that may be called (address.py) --> connection --> request --> status of the answer
"""

from __future__ import annotations

import asyncio
import ipaddress
import ssl
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

import h11

from penstock.registry.webhooks.address import AddressRefused, AddressRules, Resolve, resolve
from penstock.registry.webhooks.schedule import Answer, Failed

__all__ = ["Requests", "host_of"]

_READ_BYTES: Final = 16_384
_PORTS: Final = {"http": 80, "https": 443}


def host_of(url: str) -> str:
    """The receiver of a URL: the host and the port."""
    parts = urlsplit(url)
    return f"{parts.hostname}:{parts.port or _PORTS[parts.scheme]}"


class Requests:
    """How a deliverer calls receivers.

    connect_timeout_s: for one connection. timeout_s: for a whole try, from the look-up to the status. tls: None means
    the certificates that this system trusts.
    """

    def __init__(
        self,
        rules: AddressRules,
        *,
        connect_timeout_s: float = 5.0,
        timeout_s: float = 30.0,
        tls: ssl.SSLContext | None = None,
        look_up: Resolve = resolve,
    ) -> None:
        self.timeout_s: Final = timeout_s
        self._rules: Final = rules
        self._connect_timeout_s: Final = connect_timeout_s
        self._tls: Final = tls or ssl.create_default_context()
        self._look_up: Final = look_up

    async def post(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer | Failed:
        """The answer of the receiver; Failed when there is none."""
        try:
            async with asyncio.timeout(self.timeout_s):
                return await self._post(url, headers, body)
        except TimeoutError:
            return Failed(f"no answer within {self.timeout_s:g} s")
        except AddressRefused as refused:
            return Failed(str(refused), is_final=refused.is_final)
        except ssl.SSLError as error:
            return Failed(f"TLS failed: {getattr(error, 'verify_message', '') or error.reason or 'no reason'}")
        except h11.RemoteProtocolError:
            return Failed("the receiver gave no answer in HTTP/1.1")
        except (OSError, UnicodeError) as error:
            return Failed(f"no connection: {getattr(error, 'strerror', None) or type(error).__name__}")

    async def _post(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
        addresses = self._rules.select(host, await self._look_up(host, port))
        reader, writer = await self._connect(addresses, host, port, is_tls=parts.scheme == "https")
        try:
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            return await _exchange(reader, writer, target, {"host": parts.netloc, **headers}, body)
        finally:
            # The answer's body is not read: a receiver that sends one without end is not waited for.
            writer.transport.abort()

    async def _connect(
        self, addresses: Sequence[str], host: str, port: int, *, is_tls: bool
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """A connection to the first of the addresses that takes one."""
        problem: Exception = OSError("the host has no address")
        tls, name = (self._tls, host) if is_tls else (None, None)
        for address in addresses:
            try:
                async with asyncio.timeout(self._connect_timeout_s):
                    reader, writer = await asyncio.open_connection(address, port, ssl=tls, server_hostname=name)
            except TimeoutError:
                problem = OSError(0, f"none within {self._connect_timeout_s:g} s")
            except OSError as error:
                problem = error
            else:
                self._check_peer(host, writer)
                return reader, writer
        raise problem

    def _check_peer(self, host: str, writer: asyncio.StreamWriter) -> None:
        """Raises AddressRefused when the other end is not at an address that may be called."""
        peer = writer.get_extra_info("peername")
        if not peer or not self._rules.allows(host, ipaddress.ip_address(peer[0])):
            writer.transport.abort()
            raise AddressRefused(f"the connection to {host} went to an address that is not public", is_final=False)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: str, headers: Mapping[str, str], body: bytes
) -> Answer:
    connection = h11.Connection(h11.CLIENT)
    fields = [*headers.items(), ("content-length", str(len(body))), ("connection", "close")]
    request = h11.Request(method="POST", target=target, headers=fields)
    parts = [connection.send(request), connection.send(h11.Data(data=body)), connection.send(h11.EndOfMessage())]
    writer.write(b"".join(part or b"" for part in parts))
    await writer.drain()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(_READ_BYTES))
        elif isinstance(event, h11.Response):
            after = next((value for name, value in event.headers if name == b"retry-after"), b"")
            return Answer(event.status_code, after.decode("latin-1"))
        elif not isinstance(event, h11.InformationalResponse):
            raise h11.RemoteProtocolError("no answer")
