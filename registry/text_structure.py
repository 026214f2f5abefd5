"""The form that a generated text must have -> checked as far as that needs no compiler; the worker's engine has one.

json_schema, regex, choice, grammar -> type and size -> the engine compiles before it accepts the request
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.registry.errors import InvalidInput, described

__all__ = ["check_choice", "check_schema", "check_source"]

_MAX_BYTES: Final = 65_536
"""A larger form takes longer to compile than most texts take to write."""
_MAX_CHOICES: Final = 1_024


def check_schema(given: object) -> dict[str, Any]:
    """A JSON schema, as a mapping or as its JSON -> a mapping. Raises InvalidInput."""
    schema = given
    if isinstance(given, str):
        _check_size("json_schema", given)
        try:
            schema = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise InvalidInput(f"json_schema: found {described(given)}, expected a schema in JSON") from error
    if not isinstance(schema, Mapping):
        raise InvalidInput(f"json_schema: found {described(schema)}, expected a mapping, or its JSON")
    try:
        _check_size("json_schema", json.dumps(schema, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput("json_schema: found values that are no JSON, expected a schema in JSON") from error
    return dict(schema)


def check_choice(given: object) -> tuple[str, ...]:
    """Texts of which one is chosen. Raises InvalidInput."""
    if not isinstance(given, Sequence) or isinstance(given, str | bytes) or not given:
        raise InvalidInput(f"choice: found {described(given)}, expected a list of at least one text")
    if len(given) > _MAX_CHOICES:
        raise InvalidInput(f"choice: found {len(given)} texts, expected at most {_MAX_CHOICES}")
    for text in given:
        check_source("choice", text)
    return tuple(given)


def check_source(name: str, given: object) -> None:
    """A text of this field. Raises InvalidInput."""
    if not isinstance(given, str) or not given:
        raise InvalidInput(f"{name}: found {described(given)}, expected a text of at least one character")
    _check_size(name, given)


def _check_size(name: str, text: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > _MAX_BYTES:
        raise InvalidInput(f"{name}: found {len(text)} characters, expected at most {_MAX_BYTES} bytes")
