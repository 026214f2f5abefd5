"""The shared circuit breakers in Redis: a hash for each model, and one atomic script for each transition.

The rules are in breakers.py, and as Python in safety/breaker.py; a test runs the same histories through both.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.breakers import (
    BreakerLimits,
    BreakerReading,
    BreakerRecord,
    BreakerTransition,
    Circuit,
    FailureMark,
    split_breaker_name,
)
from penstock.registry.broker.redis_connection import RedisConnection
from penstock.registry.errors import InvalidInput, described
from penstock.registry.queues import breakers_key, parse_name

__all__ = ["UNREADABLE", "RedisBreakers"]

_MOST_REASON: Final = 200
"""Characters of a reason that are kept."""
_NONE: Final = "-"
_ID: Final = re.compile(r"[0-9a-zA-Z_.@:-]{1,128}\Z")
_CIRCUITS: Final[dict[str, Circuit]] = {"closed": "closed", "open": "open", "half-open": "half-open"}
UNREADABLE: Final = BreakerRecord("open", 1, reason="its record could not be read")
"""In the place of a record that another program has overwritten: the optimisation may not serve."""


class RedisBreakers(RedisConnection):
    """BreakerEnd on one Redis. Thread-safe."""

    def breakers(self, model: str) -> BreakerReading:
        """See BreakerEnd.breakers."""
        now_ms, *words = self._run(_call("breaker_list", parse_name("model", model), []))
        names = [f"{model}/{name.decode(errors='replace')}" for name in words[::2]]
        return BreakerReading(now_ms, dict(zip(names, map(_record, words[1::2]), strict=True)))

    def fail_breaker(
        self, name: str, reason: str, id: str, limits: BreakerLimits, *, probe: str = ""
    ) -> BreakerTransition:
        """See BreakerEnd.fail_breaker."""
        about = (_id(id), _short(reason), _id(probe) if probe else _NONE)
        return self._step("breaker_fail", name, *about, limits.failures, limits.window_ms, limits.open_ms)

    def pass_breaker(self, name: str, probe: str) -> BreakerTransition:
        """See BreakerEnd.pass_breaker."""
        return self._step("breaker_pass", name, _id(probe))

    def probe_breaker(self, name: str, probe: str, limits: BreakerLimits) -> BreakerTransition:
        """See BreakerEnd.probe_breaker."""
        return self._step("breaker_probe", name, _id(probe), limits.probe_ms)

    def force_open_breaker(self, name: str, reason: str, id: str, limits: BreakerLimits) -> BreakerTransition:
        """See BreakerEnd.force_open_breaker."""
        return self._step("breaker_force_open", name, _id(id), _short(reason), limits.open_ms)

    def reset_breaker(self, name: str) -> BreakerTransition:
        """See BreakerEnd.reset_breaker."""
        return self._step("breaker_reset", name)

    def _step(self, script: str, name: str, *args: str | int) -> BreakerTransition:
        model, local = split_breaker_name(name)
        did, line = self._run(_call(script, model, [local, *args]))
        return BreakerTransition(_record(line), bool(did))


def _call(name: str, model: str, args: Sequence[Any]) -> scripts.Call:
    return ["EVALSHA", scripts.sha_of(name), 1, breakers_key(model), *args]


def _id(text: str) -> str:
    if not _ID.match(text) or text == _NONE:
        raise InvalidInput(f"Bad id {described(text)}. Expected 1 to 128 characters of A-Z, a-z, 0-9, '_.@:-'")
    return text


def _short(reason: str) -> str:
    return reason[:_MOST_REASON].encode(errors="replace").decode()


def _record(line: bytes) -> BreakerRecord:
    words = line.decode(errors="replace").split(" ", 8)
    if len(words) != 9 or words[0] not in _CIRCUITS:
        return UNREADABLE
    circuit, *numbers, opened_by, probe, failures, reason = words
    try:
        epoch, opened_ms, retry_ms, probe_until_ms = map(int, numbers)
        marks = tuple(_mark(each) for each in failures.split(",")) if failures != _NONE else ()
    except ValueError:
        return UNREADABLE
    return BreakerRecord(
        _CIRCUITS[circuit],
        epoch,
        opened_ms,
        retry_ms,
        probe_until_ms,
        _or_empty(opened_by),
        _or_empty(probe),
        marks,
        reason,
    )


def _mark(text: str) -> FailureMark:
    at_ms, failure = text.split(":", 1)
    return FailureMark(int(at_ms), failure)


def _or_empty(word: str) -> str:
    return "" if word == _NONE else word
