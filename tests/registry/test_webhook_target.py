"""The URL of a webhook: which ones are taken, and the line of the record that only a holder of the key can write."""

from __future__ import annotations

import pytest

from penstock.registry.envelope import Keyring
from penstock.registry.errors import BadSignature, InvalidInput
from penstock.registry.webhook_target import checked_url, is_loopback, opened_target, sealed_target

KEY, OTHER = "A" * 43 + "=", "B" * 43 + "="
UNSIGNED, SIGNED = Keyring.parse(None), Keyring.parse(f"one:{KEY}")
URL = "https://example.com/hook?token=secret"
JOB = "minilm.0198c5f2-7c1e-7abc-8def-0123456789ab"


@pytest.mark.parametrize(
    "url",
    [
        URL,
        "https://example.com",
        "HTTPS://Example.COM:8443/",
        "https://a_b.internal./x",
        "https://8.8.8.8/",
        "https://[2606:4700::1]:8443/x",
        "http://localhost:9000/x",
        "http://127.0.0.1/",
        "http://127.9.9.9:1/",
        "http://[::1]/",
        "https://10.0.0.1/",
        "https://example.com/" + "x" * 2028,
    ],
)
def test_usable_url_is_taken_as_it_is(url: str):
    """Which address may be called is the deliverer's decision."""
    assert checked_url(url) == url


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("http://example.com/", "is not encrypted"),
        ("http://localhost.example.com/", "is not encrypted"),
        ("http://10.0.0.1/", "is not encrypted"),
        ("ftp://example.com/", "has the scheme 'ftp'"),
        ("javascript:alert(1)", "names no host"),
        ("example.com/hook", "names no host"),
        ("//example.com/hook", "has the scheme ''"),
        ("https://", "names no host"),
        ("https:///path", "names no host"),
        ("https://-a.example/", "names no host"),
        ("https://a..example/", "names no host"),
        ("https://user:password@example.com/", "has a user or a password"),
        ("https://user@example.com/", "has a user or a password"),
        ("https://@example.com/", "has a user or a password"),
        ("https://example.com:0/", "has the port 0"),
        ("https://example.com:99999/", "has a bad host or port"),
        ("https://example.com:http/", "has a bad host or port"),
        ("https://[::1/", "has a bad host or port"),
        ("https://example.com/#part", "has a fragment"),
        ("https://example.com/ x", "has a space"),
        ("https://example.com/\r\nX: y", "has a space"),
        ("https://example.com\\@internal/", "has a space, a backslash"),
        ("https://ex\u00e4mple.com/", "has a space, a backslash or a letter beyond ASCII"),
        ("https://example.com/" + "x" * 2029, "has 2049 characters"),
        ("", "names no host"),
    ],
)
def test_unusable_url_is_refused(url: str, problem: str):
    """With what is wrong and what is expected; the URL itself is not shown."""
    with pytest.raises(InvalidInput, match=r"^The URL of the webhook ") as refused:
        checked_url(url)
    assert problem in str(refused.value)
    assert "Expected " in str(refused.value)
    assert "password" not in str(refused.value).replace("a user or a password", "")


@pytest.mark.parametrize("url", [1, b"https://example.com/", ["https://example.com/"], object()])
def test_other_types_are_refused(url: object):
    """In the words of the other arguments."""
    with pytest.raises(InvalidInput, match=r"^webhook is .* Expected https://"):
        checked_url(url)


def test_line_holds_the_url():
    """Without keys it is the URL; with keys it has a signature behind it."""
    assert sealed_target(URL, JOB, UNSIGNED) == URL
    line = sealed_target(URL, JOB, SIGNED)
    assert line.startswith(f"{URL} ")
    assert "\n" not in line
    assert opened_target(line, JOB, SIGNED) == opened_target(URL, JOB, UNSIGNED) == URL
    assert sealed_target("", JOB, SIGNED) == ""


def test_every_flip_of_a_line_is_noticed():
    """Of the URL, of the signature, of the space between."""
    line = sealed_target(URL, JOB, SIGNED).encode()
    for place in range(len(line)):
        for bit in range(7):
            flipped = bytearray(line)
            flipped[place] ^= 1 << bit
            with pytest.raises((BadSignature, InvalidInput)):
                opened_target(flipped.decode(), JOB, SIGNED)


def test_line_belongs_to_its_job():
    """Copied into the record of another one it is refused; so is a stranger's key, and none."""
    line = sealed_target(URL, JOB, SIGNED)
    for keyring, job_id, tried in (
        (SIGNED, JOB.replace("minilm", "mlp"), line),
        (Keyring.parse(f"one:{OTHER}"), JOB, line),
        (SIGNED, JOB, URL),
        (SIGNED, JOB, f"{URL} \u00e9"),
    ):
        with pytest.raises(BadSignature):
            opened_target(tried, job_id, keyring)


def test_keys_are_rotated():
    """A deliverer accepts what an old key has signed while it has both."""
    both = Keyring.parse(f"two:{OTHER},one:{KEY}")
    assert opened_target(sealed_target(URL, JOB, SIGNED), JOB, both) == URL
    assert opened_target(sealed_target(URL, JOB, both), JOB, both) == URL


@pytest.mark.parametrize(
    ("host", "is_it"),
    [("localhost", True), ("127.0.0.2", True), ("::1", True), ("example.com", False), ("10.0.0.1", False)],
)
def test_loopback_by_name(host: str, is_it: bool):
    """No look-up decides."""
    assert is_loopback(host) is is_it
