"""Keys of ours that hold another type, because another program wrote to them: quarantined, and made anew.

    command -- WRONGTYPE --> is_foreign --> calls: quarantine.lua for the keys of the command --> the command again
    worker's report ------> sweep: quarantine.lua for the fixed keys of its models

A foreign key is renamed, not deleted, and keeps the time of expiry that its writer gave it; see quarantine_key. Nothing
asks for types before a command: only the error of a command, and the sweep every few seconds, cost anything. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from penstock.registry.broker import redis_scripts as scripts
from penstock.registry.broker.base import Quarantined
from penstock.registry.queues import (
    MODELS_KEY,
    WORKERS_KEY,
    active_key,
    breakers_key,
    dead_key,
    event_stream_key,
    flow_key,
    key_group,
    key_type,
    keyrings_key,
    lane_key,
    local_record_key,
    meter_key,
    paused_key,
    quarantine_key,
    shadow_flow_key,
    shadow_key,
    slot_in,
    spec_key,
    specs_key,
    stream_keys,
    usage_key,
)

__all__ = ["call_for", "calls", "is_foreign", "parse_quarantined", "sweep"]

_FLOW: Final = key_group(flow_key("any"))
_COUNTERS: Final = {_FLOW, key_group(usage_key("any")), key_group(meter_key("any", "any"))}
"""Hashes whose fields are counted up."""
_RECORD: Final = key_group(local_record_key("any", "any"))
_WRONG_TYPE: Final = "WRONGTYPE"
_NO_NUMBER: Final = ("hash value is not an integer", "increment or decrement would overflow")
"""A counter of a hash is no number, or too large a one. The error does not name the hash."""


def parse_quarantined(name: str) -> Quarantined:
    """What the present key of a foreign key tells.

    >>> parse_quarantined("{mlp}:quarantine:1700000000000:string:infer.{mlp}.high")[1:]
    (1700000000000, 'string', 'infer.{mlp}.high')
    """
    at_ms, _, rest = name.partition(":quarantine:")[2].partition(":")
    kind, _, key = rest.partition(":")
    return Quarantined(name, int(at_ms) if at_ms.isascii() and at_ms.isdecimal() and len(at_ms) < 15 else 0, kind, key)


def is_foreign(error: object) -> bool:
    """Whether this is the error of a command on a key that holds another type, or on a counter that is no number."""
    text = str(error)
    return isinstance(error, Exception) and (_WRONG_TYPE in text or any(part in text for part in _NO_NUMBER))


def calls(command: Sequence[Any], error: Exception) -> list[scripts.Call]:
    """The calls that quarantine the foreign keys of a command, after its error: one for each slot."""
    keys = list(dict.fromkeys(_keys_of(command)))
    has_bad_counter = _WRONG_TYPE not in str(error)
    types = {key: "counters" if has_bad_counter and key_group(key) in _COUNTERS else key_type(key) for key in keys}
    slots = dict.fromkeys(map(slot_in, keys))
    return [call_for({key: kind for key, kind in types.items() if slot_in(key) == slot}) for slot in slots]


def sweep(slots: Iterable[str]) -> list[scripts.Call]:
    """The calls that quarantine foreign keys among the fixed keys of these models, and among those of no model."""
    groups = [*map(_fixed_keys, slots), (MODELS_KEY, WORKERS_KEY)]
    return [call_for({key: key_type(key) for key in keys}) for keys in groups]


def call_for(types: Mapping[str, str]) -> scripts.Call:
    """The call that quarantines these keys of one slot where they are foreign. types: by key, its type; empty: any."""
    return scripts.quarantine(quarantine_key(slot_in(next(iter(types)))), types)


def _fixed_keys(slot: str) -> tuple[str, ...]:
    own = (
        dead_key,
        spec_key,
        specs_key,
        keyrings_key,
        active_key,
        breakers_key,
        flow_key,
        paused_key,
        lane_key,
        usage_key,
    )
    return (*stream_keys(slot), *(make(slot) for make in own), shadow_key(slot), shadow_flow_key(slot))


def _keys_of(command: Sequence[Any]) -> list[str]:
    """The keys that a command touches, with those that scripts derive: event streams, and the usage of accounts."""
    keys = scripts.keys_of(command)
    if not scripts.script_of(command):
        return keys
    derived = [event_stream_key(key) for key in keys if key_group(key) == _RECORD]
    return [*keys, *derived, *(usage_key(slot_in(key)) for key in keys if key_group(key) == _FLOW)]
