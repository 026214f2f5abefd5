"""The shadow queue in Redis: scripts that start, stop, mirror, take and settle. Each is one step on one model's keys.

    operator        start, stop, state
    worker          orders, mirror
    shadow worker   orders, take, renew, settle, note, note_canary, drift, note_drift, end

A pair is compared at least once, and counted once: `settle` adds up a comparison only if it deletes the pair.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from redis.exceptions import ResponseError

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.redis_connection import RedisConnection
from penstock.registry.errors import BrokerDamaged
from penstock.registry.queues import (
    GROUP,
    active_key,
    flow_key,
    shadow_flow_key,
    shadow_key,
    shadow_order_key,
    shadow_report_key,
    shadow_series_key,
    shadow_worst_key,
    spec_key,
    specs_key,
)
from penstock.registry.shadow import ShadowOrder

__all__ = ["CANARY_FIELD", "DRIFT_FIELD", "Mirrored", "RedisShadow", "Settled", "ShadowState", "TakenPair"]

CANARY_FIELD: Final = "canary:"
"""Before the name of a shadow worker: the field of the report with what its canary has found."""
DRIFT_FIELD: Final = "drift"
"""The field of the report with the state of the drift monitors, which all shadow workers of the model share."""
_MOST_WORST: Final = 20
_SERIES: Final = 10_000
"""Comparisons whose figures are kept in order. Drift and canary read them."""
_CALL_PAIRS: Final = 32
"""Pairs that one script hands out or settles: the jobs of the model wait for the server meanwhile."""
_NO_EXPIRY: Final = -1
"""The answer of PTTL for a key that stays."""
_REPORT_TTL_MS: Final = 30 * 24 * 3_600_000
"""How long the report of a shadow stays after its stop, or after the end of its order."""


class Mirrored(NamedTuple):
    """How many pairs of a call were appended, and how many were dropped because the queue is full."""

    appended: int
    dropped: int


class TakenPair(NamedTuple):
    """A claimed pair. `deliveries` counts how often it was claimed; `at_ms` is when it was mirrored."""

    entry_id: bytes
    sealed: bytes
    deliveries: int

    @property
    def at_ms(self) -> int:
        """When it was mirrored, by the broker's clock."""
        return int(self.entry_id.partition(b"-")[0])


@dataclass(frozen=True, slots=True)
class Settled:
    """The end of a claimed pair. outcome: a word that is counted. figures: finite numbers by name.

    series: whether its figures join the series of comparisons. badness: what `example` is sorted by; empty: none.
    """

    entry_id: bytes
    size: int
    outcome: str
    figures: Mapping[str, float] = field(default_factory=dict)
    is_in_series: bool = False
    badness: float = 0.0
    example: str = ""


@dataclass(frozen=True, slots=True)
class ShadowState:
    """All that Redis has of the shadow of a model. record: empty while none runs. pairs, claimed: in the queue.

    flow: counts of the mirror. report: fields of the comparisons. worst: JSON, the worst first. series: JSON, oldest
    first.
    """

    record: bytes
    flow: Mapping[str, str]
    report: Mapping[str, str]
    pairs: int
    worst: Sequence[str]
    series: Sequence[str]

    @property
    def is_running(self) -> bool:
        """Whether pairs are mirrored and compared: there is an order, and no canary has ended it."""
        return bool(self.record) and self.flow.get("id") != ""

    @property
    def canaries(self) -> list[str]:
        """What the canary of each shadow worker has found."""
        return [value for name, value in self.report.items() if name.startswith(CANARY_FIELD)]


class RedisShadow(RedisConnection):
    """The shadow queues of one Redis. Thread-safe. Calls raise BrokerUnavailable and BrokerRefused."""

    # Operators

    def server_ms(self) -> float:
        """The broker's clock, asked now."""
        begun = time.monotonic()
        seconds, micros = self._run(["TIME"])
        self._note_clock(int(seconds) * 1000 + int(micros) / 1000, begun)
        return self.now_ms()

    def start(self, order: ShadowOrder, record: bytes) -> bytes | None:
        """Start a shadow, and forget the last one of its model. Returns the record of one that runs, and does nothing.

        record: the sealed order.
        """
        args = [order.id, record, order.until_ms, order.candidate, order.form, order.canary_pairs, _REPORT_TTL_MS]
        running: bytes | None = self._run(_call("start_shadow", _all_keys(order.model), args))
        return running

    def stop(self, slot: str) -> tuple[bytes, int] | None:
        """Stop the shadow of a model. Returns its record and how many pairs were deleted; None: none runs."""
        stopped = self._run(_call("stop_shadow", _all_keys(slot), [_REPORT_TTL_MS]))
        return None if stopped is None else (stopped[0], stopped[1])

    def state(self, slot: str, series: int = _SERIES) -> ShadowState:
        """The shadow of a model that runs, or that ran last. series: so many of the latest comparisons."""
        latest = self._run(["XREVRANGE", shadow_series_key(slot), "+", "-", "COUNT", series]) if series else []
        return ShadowState(
            self._run(["GET", shadow_order_key(slot)]) or b"",
            _texts(self._run(["HGETALL", shadow_flow_key(slot)])),
            _texts(self._run(["HGETALL", shadow_report_key(slot)])),
            self._run(["XLEN", shadow_key(slot)]),
            [each.decode(errors="replace") for each in self._run(["ZRANGE", shadow_worst_key(slot), 0, -1])][::-1],
            [fields[1].decode(errors="replace") for _, fields in latest[::-1]],
        )

    # Workers

    def orders(self, slots: Sequence[str]) -> dict[str, bytes]:
        """The record of each slot's shadow; empty: none runs."""
        records = self._run(["MGET", *map(shadow_order_key, slots)]) if slots else []
        return {slot: record or b"" for slot, record in zip(slots, records, strict=True)}

    def mirror(self, order: ShadowOrder, pairs: Sequence[bytes], *, dropped: int = 0) -> Mirrored | None:
        """Append sealed pairs, up to the caps of the order. None: the shadow is over, and nothing was appended.

        dropped: pairs that the worker could not offer since the last call. The caller bounds the bytes of a call.
        """
        keys = [shadow_key(order.model), shadow_flow_key(order.model), flow_key(order.model)]
        args = [order.id, order.max_pairs, order.max_bytes, order.pair_ttl_ms, dropped, *pairs]
        call = _call("mirror_shadow", keys, args)
        try:
            # Not repeated when the connection is lost: a pair that was appended twice would count twice.
            with self._translated():
                answer = self._once(call)
        except BrokerDamaged:
            # The script has failed before it appended anything: this call quarantines the foreign key.
            answer = self._run(call)
        return None if answer is None else Mirrored(*answer)

    # Shadow workers

    def take(
        self, slot: str, shadow: str, consumer: str, count: int, *, most_bytes: int, lease_ms: int
    ) -> list[TakenPair] | None:
        """Claim up to `count` pairs, the longest unsettled first. None: the shadow is over.

        No further pair is claimed beyond `most_bytes`. Without `settle` or `renew` they are claimed again after
        `lease_ms`.
        """
        keys = [shadow_key(slot), shadow_flow_key(slot)]
        taken: list[TakenPair] = []
        while True:
            wanted = min(count - len(taken), _CALL_PAIRS)
            left_bytes = most_bytes - sum([len(pair.sealed) for pair in taken])
            begun = time.monotonic()
            answer = self._run(_call("take_shadow", keys, [GROUP, consumer, shadow, wanted, left_bytes, lease_ms]))
            if answer is None:
                return None
            self._note_clock(float(answer[0]), begun)
            parts = iter(answer[1:])
            more = [TakenPair(*part) for part in zip(parts, parts, parts, strict=True)]
            taken += more
            if len(more) < _CALL_PAIRS or len(taken) >= count:
                return taken

    def renew(self, slot: str, consumer: str, pairs: Sequence[TakenPair]) -> None:
        """Keep claimed pairs for another lease. Of a shadow that is over, there are none to keep."""
        ids = [pair.entry_id for pair in pairs]
        try:
            self._run(["XCLAIM", shadow_key(slot), GROUP, consumer, 0, *ids, "JUSTID"])
        except ResponseError as error:
            # Its end deletes the queue.
            if not str(error).startswith("NOGROUP"):
                raise

    def settle(self, slot: str, shadow: str, settled: Sequence[Settled]) -> list[bool]:
        """Delete pairs and add their comparisons up, in one step for each pair. Returns for each whether it was
        counted.
        """
        counted: list[bool] = []
        for start in range(0, len(settled), _CALL_PAIRS):
            counted += self._settle_some(slot, shadow, settled[start : start + _CALL_PAIRS])
        return counted

    def _settle_some(self, slot: str, shadow: str, settled: Sequence[Settled]) -> list[bool]:
        args: list[Any] = [GROUP, shadow, _MOST_WORST, _SERIES]
        for each in settled:
            series = json.dumps({"outcome": each.outcome, **each.figures}) if each.is_in_series else ""
            args += [each.entry_id, each.size, each.outcome, series, repr(each.badness), each.example]
            args.append(len(each.figures))
            for name, value in each.figures.items():
                args += [name, repr(float(value))]
        keys = [shadow_key(slot), shadow_flow_key(slot), shadow_report_key(slot)]
        keys += [shadow_worst_key(slot), shadow_series_key(slot)]
        return [letter == ord("1") for letter in self._run(_call("settle_shadow", keys, args))]

    def note(self, slot: str, **facts: str) -> None:
        """Write facts about the shadow worker into the report, such as why it cannot load the candidate."""
        self._note(slot, facts)

    def note_canary(self, slot: str, consumer: str, state: str) -> None:
        """Write what the canary of one shadow worker has found so far into the report."""
        self._note(slot, {f"{CANARY_FIELD}{consumer}": state})

    def drift(self, slot: str) -> str:
        """What note_drift wrote last for the shadow that runs or ran last; empty: nothing."""
        state: bytes | None = self._run(["HGET", shadow_report_key(slot), DRIFT_FIELD])
        return (state or b"").decode(errors="replace")

    def note_drift(self, slot: str, state: str) -> None:
        """Write the state of the drift monitors into the report, for a shadow worker that restarts."""
        self._note(slot, {DRIFT_FIELD: state})

    def _note(self, slot: str, facts: Mapping[str, str]) -> None:
        key = shadow_report_key(slot)
        has_new = self._run(["HSET", key, *(part for fact in facts.items() for part in fact)])
        # A shadow worker that is late may write after the report has expired, which makes a key without an expiry.
        if has_new and self._run(["PTTL", key]) == _NO_EXPIRY:
            self._run(["PEXPIRE", key, _REPORT_TTL_MS])

    def end(self, slot: str, shadow: str, reason: str) -> int | None:
        """End a shadow and delete its pairs; returns how many. None: it had ended already."""
        keys = [shadow_key(slot), shadow_flow_key(slot), shadow_report_key(slot)]
        ended: int | None = self._run(_call("end_shadow", keys, [shadow, reason]))
        return ended

    def active(self, slot: str) -> tuple[bytes, bytes]:
        """The record of the active version, empty before the first promotion, and the spec of the active version."""
        record, spec = self._run(["MGET", active_key(slot), spec_key(slot)])
        return record or b"", spec or b""

    def spec(self, slot: str, version: str) -> bytes:
        """The spec of a version; empty: none was published."""
        return self._run(["HGET", specs_key(slot), version]) or b""


def _all_keys(slot: str) -> list[str]:
    makers = (
        *(shadow_order_key, shadow_key, shadow_flow_key),
        *(shadow_report_key, shadow_worst_key, shadow_series_key),
    )
    return [make(slot) for make in makers]


def _call(name: str, keys: Sequence[str], args: Sequence[Any]) -> scripts.Call:
    return ["EVALSHA", scripts.sha_of(name), len(keys), *keys, *args]


def _texts(answer: Sequence[bytes]) -> dict[str, str]:
    texts = [each.decode(errors="replace") for each in answer]
    return dict(zip(texts[::2], texts[1::2], strict=True))
