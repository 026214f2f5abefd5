"""What one generation asks of the engine: keywords or a mapping -> SamplingParams, checked before anything is queued.

Only fields that the engine obeys exist. Any other name is refused, so no wish is ignored.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from penstock.registry.errors import InvalidInput, described, shown

__all__ = ["SamplingParams"]

_MAX_SEED: Final = 2**64 - 1
_MAX_STOPS: Final = 16
_MAX_LOGPROBS: Final = 20
_ALIASES: Final = {"max_new_tokens": "max_tokens"}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when a text ends.

    The order is temperature, top_k, top_p inside of top_k, min_p. Raises InvalidInput for a value out of its range.
    """

    max_tokens: int = 128
    """Most tokens that are generated."""
    temperature: float = 1.0
    """0 is greedy: the most probable token. The filters and the seed have no meaning then."""
    top_k: int = 0
    """Only the k most probable tokens; 0 is all."""
    top_p: float = 1.0
    """The fewest tokens whose probabilities reach this sum."""
    min_p: float = 0.0
    """Only tokens of at least this share of the highest probability."""
    seed: int | None = None
    """Equal seeds give equal tokens, in any batch. None draws one for each request."""
    stop: Sequence[str] = ()
    """The text ends before the first of these."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the text, beside the model's own."""
    ignore_eos: bool = False
    """The model's own end does not end the text."""
    min_tokens: int = 0
    """So many tokens are generated before a token may end the text."""
    logprobs: int | None = None
    """The log probabilities of so many most probable tokens, and of the chosen one, at each position."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else _tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _tuple("stop_token_ids", self.stop_token_ids))
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_float("temperature", self.temperature, "a number from 0 to 100", lambda value: 0 <= value <= 100)
        _check_int("top_k", self.top_k, 0, None)
        _check_float("top_p", self.top_p, "a number above 0, at most 1", lambda value: 0 < value <= 1)
        _check_float("min_p", self.min_p, "a number from 0 to 1", lambda value: 0 <= value <= 1)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, _MAX_SEED)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, _MAX_LOGPROBS)
        _check_int("min_tokens", self.min_tokens, 0, None)
        if self.min_tokens > self.max_tokens:
            raise InvalidInput(f"min_tokens: found {self.min_tokens}, expected at most max_tokens, {self.max_tokens}")
        _check_bool("ignore_eos", self.ignore_eos)
        if len(self.stop) > _MAX_STOPS:
            raise InvalidInput(f"stop: found {len(self.stop)} strings, expected at most {_MAX_STOPS}")
        for text in self.stop:
            _check_text("stop", text)
        for token in self.stop_token_ids:
            _check_int("stop_token_ids", token, 0, None)

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> SamplingParams:
        """Of names and values, as they come from JSON. `max_new_tokens` is another name of max_tokens.

        Raises InvalidInput for a name that is no field.
        """
        known = [field.name for field in fields(cls)]
        chosen: dict[str, Any] = {}
        for given, value in options.items():
            name = _ALIASES.get(given, given)
            if name not in known:
                near = difflib.get_close_matches(str(given), known, 1)
                hint = f", did you mean {near[0]}" if near else ""
                raise InvalidInput(f"Unknown sampling field {shown(given)}{hint}. Expected: {', '.join(known)}")
            if name in chosen:
                raise InvalidInput(f"Found max_tokens and max_new_tokens, expected one of them: {name} is set twice")
            chosen[name] = value
        return cls(**chosen)

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is chosen."""
        return self.temperature == 0


def _tuple(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return tuple(values)
    raise InvalidInput(f"{name}: found {described(values)}, expected a list")


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name}: found {described(value)}, expected true or false")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{name}: found {described(value)}, expected strings of at least one character")


def _check_int(name: str, value: object, least: int, most: int | None) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most):
        return
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise InvalidInput(f"{name}: found {described(value)}, expected an integer {expected}")


def _check_float(name: str, value: object, expected: str, is_right: Any) -> None:
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and is_right(value):
        return
    raise InvalidInput(f"{name}: found {described(value)}, expected {expected}")
