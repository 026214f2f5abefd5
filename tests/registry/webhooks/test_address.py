"""Which addresses may be called: public ones, and what the operator allows."""

from __future__ import annotations

import asyncio
import ipaddress

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.webhooks.address import AddressRefused, AddressRules, is_public, resolve

PUBLIC = ["8.8.8.8", "93.184.216.34", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"]
FORBIDDEN = [
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254"),  # noqa: S104
    *("100.64.0.1", "192.0.2.1", "198.18.0.1", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255"),
    *("::1", "::", "fe80::1", "fe80::1%2", "fc00::1", "fd12::1", "ff02::1", "ff0e::1", "2001:db8::1", "::127.0.0.1"),
    *("::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "64:ff9b::10.0.0.1", "64:ff9b::7f00:1"),
    *("2002:7f00:1::", "2002:a9fe:a9fe::1", "2001:0:7f00:1::", "fec0::1"),
]


@pytest.mark.parametrize("address", PUBLIC)
def test_public_address_may_be_called(address: str):
    """IPv4, IPv6, and IPv4 inside IPv6."""
    assert is_public(ipaddress.ip_address(address))
    assert AddressRules().select("example.com", [address]) == [address]


@pytest.mark.parametrize("address", FORBIDDEN)
def test_other_address_is_refused(address: str):
    """Loopback, private, link-local, shared, documentation, multicast, reserved, and each of them inside IPv6."""
    assert not is_public(ipaddress.ip_address(address))
    with pytest.raises(AddressRefused, match="is not a public one"):
        AddressRules().select("example.com", [address])


def test_only_the_public_ones_of_an_answer_are_called():
    """A name with both kinds has its public ones."""
    assert AddressRules().select("example.com", ["10.0.0.1", "8.8.8.8", "::1"]) == ["8.8.8.8"]


@pytest.mark.parametrize(
    ("allowed", "host", "address"),
    [
        ("10.1.0.0/16", "a.internal", "10.1.2.3"),
        ("10.1.0.0/16", "a.internal", "::ffff:10.1.2.3"),
        ("127.0.0.1", "localhost", "127.0.0.1"),
        ("::1", "localhost", "::1"),
        ("fd00::/8", "a.internal", "fd12::1"),
        ("Receiver.Internal", "receiver.internal", "192.168.1.9"),
        ("receiver.internal", "RECEIVER.internal", "192.168.1.9"),
    ],
)
def test_operator_allows_hosts_and_networks(allowed: str, host: str, address: str):
    """By name, by address, by network; upper case is lower case."""
    assert AddressRules([allowed]).select(host, [address]) == [address]


@pytest.mark.parametrize(
    ("allowed", "host", "address"),
    [
        ("10.1.0.0/16", "a.internal", "10.2.0.1"),
        ("receiver.internal", "other.internal", "192.168.1.9"),
        ("receiver.internal", "receiver.internal.example.com", "127.0.0.1"),
        ("127.0.0.1", "localhost", "::1"),
        ("10.0.0.0/8", "a.internal", "2001:0:a00:1::7f00:1"),
    ],
)
def test_what_is_allowed_is_exact(allowed: str, host: str, address: str):
    """Neither another network, a longer name, nor a tunnel."""
    with pytest.raises(AddressRefused):
        AddressRules([allowed]).select(host, [address])


@pytest.mark.parametrize("entry", ["", "10.0.0.0/33", "http://a.internal", "a.internal:8080", "a/b"])
def test_unusable_entry_is_refused(entry: str):
    """At start, with the entry."""
    with pytest.raises(ConfigurationError, match=r"webhooks\.allow has "):
        AddressRules([entry])


def test_literal_address_is_refused_for_good():
    """A name may get another address; a URL with an address has only that one."""
    for host, is_final in (("127.0.0.1", True), ("::1", True), ("localhost", False)):
        with pytest.raises(AddressRefused) as refused:
            AddressRules().select(host, ["127.0.0.1"])
        assert refused.value.is_final is is_final


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1", "2130706433", "0x7f.1", "localhost"])
def test_every_spelling_of_loopback_is_looked_up(host: str):
    """The resolver reads forms that no parser of URLs knows: the rules see what it found."""
    found = asyncio.run(resolve(host, 80))
    assert all(ipaddress.ip_address(each).is_loopback for each in found)
    with pytest.raises(AddressRefused):
        AddressRules().select(host, found)


def test_rules_may_take_the_loopback_alone():
    """Those of text servers: every other address needs an entry, a public one, too."""
    rules = AddressRules(["big.internal", "10.0.0.0/8"], setting="runtime_hosts", takes_public=False)
    assert rules.select("localhost", ["127.0.0.1", "::1", "93.184.216.34"]) == ["127.0.0.1", "::1"]
    assert rules.select("a", ["::ffff:127.0.0.1", "10.1.2.3"]) == ["::ffff:127.0.0.1", "10.1.2.3"]
    assert rules.select("big.internal", ["93.184.216.34"]) == ["93.184.216.34"]
    for address in ("93.184.216.34", "169.254.169.254", "192.168.0.1", "2001:4860:4860::8888"):
        with pytest.raises(AddressRefused, match="not on the loopback, and runtime_hosts does not name it"):
            rules.select("a", [address])
