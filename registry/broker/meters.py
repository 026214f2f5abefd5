"""Limits of requests and tokens: what a call of spend.lua asks, and what it answers. Pure.

Meter(key, kind, limit) -> Request(meters with costs) -> one call for many requests -> Spent per request
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from penstock.registry.broker import redis_scripts as scripts

__all__ = ["Charge", "Meter", "Reading", "Spent", "WindowKind", "spend", "spent"]

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
    """What a request costs on a meter. 0: it needs room for 1, and costs nothing yet."""

    meter: Meter
    cost: int


class Reading(NamedTuple):
    """A meter after a request: what is left, and in how many seconds there is more."""

    meter: Meter
    left: int
    reset_s: int


class Spent(NamedTuple):
    """Whether a request was admitted and charged, and its meters."""

    is_admitted: bool
    readings: tuple[Reading, ...]


def spend(requests: Sequence[Sequence[Charge]]) -> scripts.Call:
    """One call that admits or refuses requests, in order. Each is charged on all its meters, or on none."""
    keys: list[str] = []
    words: list[Any] = [len(requests)]
    for charges in requests:
        words.append(len(charges))
        for meter, cost in charges:
            keys.append(meter.key)
            words += (meter.kind, meter.limit, cost)
    return ["EVALSHA", scripts.sha_of("spend"), len(keys), *keys, *words]


def spent(requests: Sequence[Sequence[Charge]], answer: Sequence[Sequence[int]]) -> list[Spent]:
    """Parses the answer of `spend`."""
    return [
        Spent(found[0] == 1, tuple(_readings(charges, found))) for charges, found in zip(requests, answer, strict=True)
    ]


def _readings(charges: Sequence[Charge], found: Sequence[int]) -> Iterator[Reading]:
    for place, charge in enumerate(charges):
        yield Reading(charge.meter, found[1 + 2 * place], found[2 + 2 * place])
