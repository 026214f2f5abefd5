"""The URL of a job's webhook: its form, and its line in the record of the job, which the broker reads.

    submit(webhook=URL) -> checked_url -> Options.webhook, under the job's signature
                                      `-> sealed_target: URL and MAC -> record -> queue -> opened_target -> deliverer

The envelope of an ended job is gone. The MAC in the line covers URL and job id, with the key that signs the job, so
that a process without the key cannot have another URL called.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from typing import Final
from urllib.parse import SplitResult, urlsplit

from penstock.registry.envelope import Keyring
from penstock.registry.errors import BadSignature, InvalidInput, described

__all__ = ["checked_url", "is_address", "is_loopback", "opened_target", "sealed_target"]

_LONGEST: Final = 2048
_EXPECTED: Final = "Expected https://host/path, or http:// for a loopback host"
_HOST: Final = re.compile(r"[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?")
_PURPOSE: Final = b"penstock webhook v1\n"
"""No envelope begins like this: a signature of a target is none of a job."""


def checked_url(url: object) -> str:
    """`url`, if a webhook may have it. Raises InvalidInput, without the URL: it may hold a secret."""
    if not isinstance(url, str):
        raise InvalidInput(f"webhook is {described(url)}. {_EXPECTED}")
    if len(url) > _LONGEST:
        raise InvalidInput(f"The URL of the webhook has {len(url)} characters. Expected at most {_LONGEST}")
    if not re.fullmatch(r"[!-~]*", url) or "\\" in url:
        raise InvalidInput(f"The URL of the webhook has a space, a backslash or a letter beyond ASCII. {_EXPECTED}")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise InvalidInput(f"The URL of the webhook has a bad host or port. {_EXPECTED}") from None
    if problem := _problem(parts, port):
        raise InvalidInput(f"The URL of the webhook {problem}. {_EXPECTED}")
    return url


def _problem(parts: SplitResult, port: int | None) -> str:
    """What is wrong with the parts of a URL; empty: nothing."""
    host = parts.hostname or ""
    if not host or not (_HOST.fullmatch(host) or is_address(host)):
        return "names no host"
    if parts.scheme not in ("http", "https"):
        return f"has the scheme {described(parts.scheme)}"
    if "@" in parts.netloc:
        return "has a user or a password"
    if parts.scheme == "http" and not is_loopback(host):
        return "is not encrypted"
    if port == 0:
        return "has the port 0"
    return "has a fragment" if parts.fragment else ""


def is_loopback(host: str) -> bool:
    """Whether a host of a URL is this machine, by its name alone."""
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    """Whether a host of a URL is an address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def sealed_target(url: str, job_id: str, keyring: Keyring) -> str:
    """The line of a job's record: the URL, and its MAC while jobs are signed. Empty without a URL."""
    if not url or not keyring.signs:
        return url
    mac = keyring.job_macs[keyring.signing_id].digest(_signed(url, job_id))
    return f"{url} {mac.hex()}"


def opened_target(line: str, job_id: str, keyring: Keyring) -> str:
    """The URL of a line. Raises BadSignature, and InvalidInput for a URL that no client would send."""
    url, _, mac = line.partition(" ")
    if keyring.signs:
        macs = [each.digest(_signed(url, job_id)).hex() for each in keyring.job_macs.values()]
        if not any([hmac.compare_digest(each.encode(), mac.encode()) for each in macs]):
            raise BadSignature(
                "a webhook whose URL is not signed with a key of its deliverer. "
                "Expected the same PENSTOCK_SIGNING_KEYS at both ends"
            )
    return checked_url(url)


def _signed(url: str, job_id: str) -> bytes:
    return _PURPOSE + f"{job_id}\n{url}".encode(errors="replace")
