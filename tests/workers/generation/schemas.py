"""Random JSON schemas whose texts have an end: strings and lists are bounded, so that no model writes on.

Digits of numbers have no bound: a penalty for frequent tokens ends them.
"""

from __future__ import annotations

import random
from typing import Any

__all__ = ["OPEN", "random_schema"]

_NAMES = ["name", "age", "größe", "tags", "a b", 'quo"te', "x"]
_ENUM: list[Any] = ["red", "green", 3, None, True, "日本"]
_DEFINED: dict[str, Any] = {
    "size": {"type": "integer", "minimum": -5, "maximum": 20},
    "word": {"type": "string", "maxLength": 5},
    "node": {
        "type": "object",
        "properties": {"is_last": {"type": "boolean"}, "next": {"$ref": "#/$defs/node"}},
        "required": ["is_last"],
        "additionalProperties": False,
    },
}
OPEN: list[dict[str, Any]] = [
    {"type": "object"},
    {"type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"]},
    {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9}},
    {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "object"}}},
    {"type": "array", "items": {"type": "boolean"}},
    {"type": "string"},
    {},
]
"""Schemas with texts of any length."""


def random_schema(seed: int) -> dict[str, Any]:
    """An object at the top, three levels deep at most, with definitions that its parts may refer to."""
    return {**_object(random.Random(seed), 2), "$defs": _DEFINED}


def _any(chosen: random.Random, depth: int) -> dict[str, Any]:
    leaves = [_string, _integer, _number, _enum, _plain, _pattern, _format, _reference]
    return chosen.choice(leaves if depth == 0 else [*leaves, _object, _list, _any_of, _one_of])(chosen, depth)


def _object(chosen: random.Random, depth: int) -> dict[str, Any]:
    names = chosen.sample(_NAMES, chosen.randrange(0, 4))
    required = [name for name in names if chosen.random() < 0.6]
    properties = {name: _any(chosen, depth - 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _list(chosen: random.Random, depth: int) -> dict[str, Any]:
    least = chosen.randrange(0, 2)
    return {
        "type": "array",
        "items": _any(chosen, depth - 1),
        "minItems": least,
        "maxItems": least + chosen.randrange(1, 3),
    }


def _any_of(chosen: random.Random, depth: int) -> dict[str, Any]:
    return {"anyOf": [_any(chosen, depth - 1) for _ in range(2)]}


def _one_of(chosen: random.Random, depth: int) -> dict[str, Any]:
    # More than one branch must not hold: their types differ.
    return {"oneOf": [_string(chosen, depth), _integer(chosen, depth), {"type": "null"}]}


def _reference(chosen: random.Random, depth: int) -> dict[str, Any]:
    return {"$ref": f"#/$defs/{chosen.choice([*_DEFINED])}"}


def _format(chosen: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "format": chosen.choice(["date", "ipv4", "uuid"])}


def _string(chosen: random.Random, depth: int) -> dict[str, Any]:
    least = chosen.randrange(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + chosen.randrange(1, 6)}


def _pattern(chosen: random.Random, depth: int) -> dict[str, Any]:
    return {"type": "string", "pattern": chosen.choice(["^[a-c]{1,4}$", "^(yes|no)$", "^[0-9]{4}-[0-9]{2}$"])}


def _integer(chosen: random.Random, depth: int) -> dict[str, Any]:
    least = chosen.randrange(-50, 50)
    return {"type": "integer", "minimum": least, "maximum": least + chosen.randrange(0, 500)}


def _number(chosen: random.Random, depth: int) -> dict[str, Any]:
    least = chosen.randrange(-50, 50)
    bounds = {"minimum": least, "maximum": least + chosen.randrange(1, 500) / 4}
    return chosen.choice(
        [
            {"type": "number"},
            {"type": "number", **bounds},
            {"type": "number", "exclusiveMinimum": least},
            {"type": "number", "enum": [round(chosen.uniform(-9, 9), 2) for _ in range(3)]},
        ]
    )


def _enum(chosen: random.Random, depth: int) -> dict[str, Any]:
    return {"enum": chosen.sample(_ENUM, chosen.randrange(1, 4))}


def _plain(chosen: random.Random, depth: int) -> dict[str, Any]:
    return chosen.choice([{"type": "boolean"}, {"type": "null"}, {"const": "fixed"}])
