"""Which addresses a URL from outside may lead to: public ones, and those that the operator allows. The guard of
webhooks and of text servers against SSRF.

    host --> one look-up --> addresses --> those that may be called --> the connection is made to one of these

A name is looked up once for a try. The connection goes to an address of that very answer, so a second answer of the
name's server decides nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network
from typing import Final, TypeAlias

from penstock.registry.errors import ConfigurationError, shown
from penstock.registry.webhook_target import is_address

__all__ = ["AddressRefused", "AddressRules", "Resolve", "is_public", "resolve"]

Address: TypeAlias = IPv4Address | IPv6Address
Resolve: TypeAlias = Callable[[str, int], Awaitable[Sequence[str]]]
"""(host, port) -> addresses. Raises OSError."""
_LOOPBACK: Final = ("127.0.0.0/8", "::1/128")
_NAT64: Final = IPv6Network("64:ff9b::/96")


class AddressRefused(Exception):
    """No address of a host may be called. is_final: the URL itself names the address."""

    def __init__(self, message: str, *, is_final: bool) -> None:
        super().__init__(message)
        self.is_final = is_final


class AddressRules:
    """The rules of one caller.

    allowed: host names, addresses and networks that may be called although they are not public. A name that is allowed
    may have any address. setting: the one that has `allowed`, for messages. takes_public: public addresses need no
    entry; else those of the loopback need none. Raises ConfigurationError for an entry that is none of these.
    """

    def __init__(
        self, allowed: Sequence[str] = (), *, setting: str = "webhooks.allow", takes_public: bool = True
    ) -> None:
        self._setting: Final = setting
        self._takes_public: Final = takes_public
        self._names: Final[set[str]] = set()
        self._networks: Final[list[IPv4Network | IPv6Network]] = []
        for entry in (*allowed, *(() if takes_public else _LOOPBACK)):
            self._add(entry.strip().lower())

    def _add(self, entry: str) -> None:
        try:
            self._networks.append(ipaddress.ip_network(entry, strict=False))
        except ValueError:
            if not entry or "/" in entry or ":" in entry:
                raise ConfigurationError(
                    f"{self._setting} has {shown(entry)}. "
                    "Expected host names, addresses or networks such as 10.1.0.0/16"
                ) from None
            self._names.add(entry)

    def allows(self, host: str, address: Address) -> bool:
        """Whether a URL with this host may be called at this address."""
        if host.lower() in self._names or (self._takes_public and is_public(address)):
            return True
        mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
        return any((mapped or address) in network for network in self._networks)

    def select(self, host: str, found: Sequence[str]) -> list[str]:
        """The addresses, of those that a look-up found, that may be called. Raises AddressRefused when none may."""
        allowed = [each for each in found if self.allows(host, ipaddress.ip_address(each))]
        if not allowed:
            raise AddressRefused(
                f"the address of {host} is not {'a public one' if self._takes_public else 'on the loopback'}, and "
                f"{self._setting} does not name it",
                is_final=is_address(host),
            )
        return allowed


def is_public(address: Address) -> bool:
    """Whether the address, and each IPv4 address inside it, belongs to the public internet."""
    return all(
        form.is_global and not (form.is_multicast or form.is_reserved or _is_site_local(form))
        for form in _forms(address)
        if not _is_wrapper(form)
    )


def _forms(address: Address) -> list[Address]:
    """The address, and the IPv4 addresses to which a system may send what is meant for it."""
    if isinstance(address, IPv4Address):
        return [address]
    inside: list[IPv4Address | None] = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
    if address in _NAT64 or int(address) >> 32 == 0:
        inside.append(IPv4Address(int(address) & 0xFFFFFFFF))
    return [address, *(each for each in inside if each is not None)]


def _is_wrapper(address: Address) -> bool:
    """Whether only the IPv4 address inside decides."""
    return isinstance(address, IPv6Address) and (address.ipv4_mapped is not None or address in _NAT64)


def _is_site_local(address: Address) -> bool:
    """Private addresses of an earlier standard, which Python counts as global."""
    return isinstance(address, IPv6Address) and address.is_site_local


async def resolve(host: str, port: int) -> list[str]:
    """The addresses of a host, as the system's resolver orders them. Raises OSError."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))
