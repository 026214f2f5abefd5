"""Limits of requests and tokens: what a call of spend.lua asks, and what it answers; what accounts have used. Pure.

Meter(key, kind, limit) -> Request(meters with costs) -> one call for many requests -> Spent per request
a committed text -> token_charge: it was generated, so it is charged also beyond the limit
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import Usage
from penstock.registry.queues import charged_key, meter_key, usage_key

__all__ = [
    "Lines",
    "charged",
    "parse_charged",
    "TOKENS",
    "Charge",
    "Meter",
    "Reading",
    "Spent",
    "WindowKind",
    "account_subject",
    "parse_usage",
    "spend",
    "spent",
    "token_charge",
    "usage",
]

TOKENS: Final = "tokens"
"""The name of the meter of tokens."""
_NO_LIMIT: Final = 2**53
_USAGE: Final = {"": "jobs", "prompt": "prompt_tokens", "generated": "generated_tokens"}
"""The fields of a Usage, by the last part of a field of usage_key."""

WindowKind: TypeAlias = Literal["m", "d", "M"]
"""A sliding minute, a day or a month of UTC."""


class Meter(NamedTuple):
    """One limit of one caller, tenant, address or route. name: how clients see it. key: see registry.queues.meter_key.

    limit: of what is charged within the window.
    """

    name: str
    key: str
    kind: WindowKind
    limit: int


class Charge(NamedTuple):
    """What a request costs on a meter. 0: it needs room for 1, and costs nothing yet.

    replaces: the second of an earlier charge of 1, which is taken back in any case; 0: there is none.
    """

    meter: Meter
    cost: int
    replaces: int = 0


class Reading(NamedTuple):
    """A meter after a request: what is left, and in how many seconds there is more. second: when it was charged."""

    meter: Meter
    left: int
    reset_s: int
    second: int = 0


class Lines(NamedTuple):
    """Lines of a batch that are charged together, once: a repeated call charges nothing. numbers: from 0 on."""

    batch_id: str
    numbers: Sequence[int]


class Spent(NamedTuple):
    """Whether a request was admitted and charged, and its meters."""

    is_admitted: bool
    readings: tuple[Reading, ...]


def account_subject(account: str) -> str:
    """Whom the meters of an API key name."""
    return f"key:{account}"


def token_charge(account: str, tokens: int) -> Charge:
    """Tokens that an API key has had already."""
    return Charge(Meter(TOKENS, meter_key(account_subject(account), TOKENS), "m", _NO_LIMIT), tokens)


def spend(requests: Sequence[Sequence[Charge]], lines: Mapping[int, Lines] | None = None) -> scripts.Call:
    """One call that admits or refuses requests, in order. Each is charged on all its meters, or on none.

    lines: of a request, by its place.
    """
    keys: list[str] = []
    words: list[Any] = [len(requests)]
    for place, charges in enumerate(requests):
        of_batch = lines.get(place) if lines else None
        words += (len(charges), len(of_batch.numbers) if of_batch else 0)
        for meter, cost, replaces in charges:
            keys.append(meter.key)
            words += (meter.kind, meter.limit, cost, replaces)
        if of_batch:
            keys.append(charged_key(of_batch.batch_id))
            words += of_batch.numbers
    return ["EVALSHA", scripts.sha_of("spend"), len(keys), *keys, *words]


def spent(requests: Sequence[Sequence[Charge]], answer: Sequence[Sequence[int]]) -> list[Spent]:
    """Parses the answer of `spend`."""
    return [
        Spent(found[0] == 1, tuple(_readings(charges, found))) for charges, found in zip(requests, answer, strict=True)
    ]


def _readings(charges: Sequence[Charge], found: Sequence[int]) -> Iterator[Reading]:
    for place, charge in enumerate(charges):
        yield Reading(charge.meter, *found[1 + 3 * place : 4 + 3 * place])


def charged(batch_id: str) -> scripts.Call:
    """Which lines of a batch were charged."""
    return ["GET", charged_key(batch_id)]


def parse_charged(answer: bytes | None) -> frozenset[int]:
    """Parses the answer of `charged`: the numbers of the lines."""
    bits = enumerate(answer or b"")
    return frozenset(8 * place + bit for place, byte in bits for bit in range(8) if byte & 0x80 >> bit)


def usage(slot: str) -> scripts.Call:
    """What accounts have used of a slot."""
    return ["HGETALL", usage_key(slot)]


def parse_usage(answer: Sequence[bytes]) -> dict[tuple[str, str], Usage]:
    """Parses the answer of `usage`: by account and month."""
    words = iter(answer)
    found: defaultdict[tuple[str, str], Usage] = defaultdict(Usage)
    for field, count in zip(words, words, strict=True):
        account, month, kind = [*field.decode(errors="replace").split(":"), "", ""][:3]
        # Another program may have written to the field.
        if count.isdigit() and (name := _USAGE.get(kind)):
            found[account, month] = found[account, month]._replace(**{name: int(count)})
    return dict(found)
