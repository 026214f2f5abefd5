"""Headers and query parameters that say how a job is to be answered: Prefer, Idempotency-Key, wait, Accept.

A value that is out of grammar is refused with 400, before the job is submitted.
"""

from __future__ import annotations

import re
from typing import Final

from penstock.producers.gateway.exchange import JSON, Exchange, RequestRefused
from penstock.producers.gateway.tensors import BINARY, MSGPACK
from penstock.registry.errors import InvalidInput

__all__ = [
    "HEAD_HEADER",
    "KEY_HEADER",
    "LONGEST_WAIT_S",
    "check_grammar",
    "checked_key",
    "idempotency_key",
    "preferred_wait_s",
    "query_wait_s",
    "refuse_key",
    "wanted_type",
]

LONGEST_WAIT_S: Final = 300
KEY_HEADER: Final = {"Idempotency-Key": "a second request with this key and the same body gets the first one's job"}
HEAD_HEADER: Final = {"Inference-Header-Content-Length": "the bytes of the JSON before those of the tensors"}
"""What routes say of these headers in the OpenAPI document."""
_KEY: Final = re.compile(r'"([\x20\x21\x23-\x5b\x5d-\x7e]{1,255})"|([\x21\x23-\x2b\x2d-\x7e]{1,255})')
"""A string of RFC 8941, or bare: visible ASCII without quotes and commas."""
_PLAIN: Final = r"[!#$%&'*+.^_`|~0-9A-Za-z-]++"
_WORD: Final = rf'(?:{_PLAIN}|"(?:[^"\\]|\\.)*+")?+'
# Possessive: a header may be long, and each of its spaces could be tried in several places.
_PREFERENCE: Final = re.compile(
    rf"({_PLAIN})\s*+(?:=\s*+({_WORD})\s*+)?+(?:;\s*+(?:{_PLAIN}\s*+(?:=\s*+{_WORD}\s*+)?+)?+)*+(?=,|$)"
)
"""RFC 7240 2: a token, perhaps with a value, which may be in quotes, and with parameters."""
_QUALITY: Final = re.compile(r";\s*q=([01](?:\.\d{0,3})?)\s*$")
_BINARY_TYPES: Final = {BINARY.decode(): BINARY, MSGPACK.decode(): MSGPACK}


def idempotency_key(exchange: Exchange) -> str | None:
    """The key of `Idempotency-Key`; None without one."""
    if b"idempotency-key" not in exchange.headers:
        return None
    return checked_key(exchange.header(b"idempotency-key"))


def refuse_key(exchange: Exchange, reason: str) -> None:
    """Raises RequestRefused for a key that the route cannot honour: a client would take its retry for safe."""
    if b"idempotency-key" in exchange.headers:
        raise RequestRefused(400, f"Found Idempotency-Key. Expected none: {reason}")


def check_grammar(exchange: Exchange) -> None:
    """Raises RequestRefused for headers out of grammar, whether the route has a use for them or not."""
    if b"idempotency-key" in exchange.headers:
        idempotency_key(exchange)
    if b"prefer" in exchange.headers:
        preferred_wait_s(exchange)


def checked_key(text: str) -> str:
    """The key that a header has. Raises RequestRefused for one out of grammar."""
    found = _KEY.fullmatch(text.strip())
    if found is None:
        raise RequestRefused(400, "Bad Idempotency-Key. Expected 1 to 255 visible ASCII characters, best in quotes")
    return found[1] or found[2]


def preferred_wait_s(exchange: Exchange) -> float:
    """The seconds of the first `Prefer: wait=N`, at most LONGEST_WAIT_S; 0 without it, as for `respond-async` alone."""
    text = exchange.header_list(b"prefer")
    wait_s: int | None = None
    at = _behind_empty(text, 0)
    while at < len(text):
        found = _PREFERENCE.match(text, at)
        value = "" if found is None else (found[2] or "").strip('"')
        if found is None or (found[1].lower() == "wait" and not (value.isascii() and value.isdigit())):
            raise RequestRefused(400, "Bad Prefer. Expected preferences such as wait=10, in seconds")
        if found[1].lower() == "wait" and wait_s is None:
            wait_s = min(LONGEST_WAIT_S, int(value.lstrip("0")[:9] or 0))
        at = _behind_empty(text, found.end())
    return wait_s or 0


def _behind_empty(text: str, at: int) -> int:
    """Where the next element of a list begins. Those before it may be empty; see RFC 9110 5.6.1."""
    while at < len(text) and text[at] in ", \t":
        at += 1
    return at


def query_wait_s(exchange: Exchange) -> float:
    """The seconds of `?wait=N`. Raises InvalidInput."""
    text = exchange.query().get("wait", "0")
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) > LONGEST_WAIT_S:
        raise InvalidInput(f"Bad wait. Expected whole seconds, at most {LONGEST_WAIT_S}")
    return int(text)


def wanted_type(exchange: Exchange) -> bytes:
    """The content type of the outputs: what Accept prefers; else, for a binary body, that of the body; else JSON."""
    accept = exchange.headers.get(b"accept")
    best, quality, refused = b"", 0.0, set[bytes]()
    if accept is not None and accept != b"*/*":
        for kind in exchange.header_list(b"accept").lower().split(","):
            name = kind.partition(";")[0].strip()
            offered = JSON if name == "application/json" else _BINARY_TYPES.get(name)
            if offered is None:
                continue
            found = _QUALITY.search(kind)
            wanted = 1.0 if found is None else float(found[1])
            # Of those that are wanted alike, the first one.
            if wanted > quality:
                best, quality = offered, wanted
            elif not wanted:
                refused.add(offered)
    of_body = _BINARY_TYPES.get(exchange.media_type, JSON)
    return best or (JSON if of_body in refused else of_body)
