"""What one generation asks of the engine: keywords or a mapping -> SamplingParams, checked before anything is queued.

Only fields that the engine obeys exist. Any other name is refused, so no wish is ignored.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final

from penstock.registry.errors import InvalidInput, described, shown
from penstock.registry.text_structure import check_choice, check_schema, check_source

__all__ = ["SamplingParams"]

_MAX_SEED: Final = 2**64 - 1
_MAX_STOPS: Final = 16
_MAX_LOGPROBS: Final = 20
_MAX_TEXTS: Final = 64
_MAX_BIASES: Final = 1_024
_ALIASES: Final = {"max_new_tokens": "max_tokens"}
_STRUCTURES: Final = ("json_schema", "regex", "choice", "grammar")


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, and when a text ends.

    The order is penalties, logit_bias, forbidden tokens, temperature, top_k, top_p inside of top_k, min_p. Raises
    InvalidInput for a value out of its range, and for fields that contradict each other.
    """

    max_tokens: int = 128
    """Most tokens that are generated."""
    n: int = 1
    """Texts of one prompt. Text i is that of the seed plus i."""
    best_of: int | None = None
    """So many texts are generated, and the n with the highest mean log probability of a token are returned."""
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
    """So many tokens are generated before a token or a stop string may end the text."""
    logprobs: int | None = None
    """The log probabilities of so many most probable tokens, and of the chosen one, at each position."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, from the second on."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that the output has."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token for each time that the output has it."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens in prompt and output, and multiplies their negative ones."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these tokens. JSON has the numbers of tokens as strings."""
    bad_words: Sequence[str] = ()
    """The tokens of these words, with and without a space before them, are not generated one after the other."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens are generated; a text ends by itself only where its end is among them."""
    timeout_s: float | None = None
    """Seconds after which the text ends as it is. They count from its first start, also where another worker continues
    it."""
    json_schema: Mapping[str, Any] | str | None = None
    """The text is JSON of this schema: a mapping, or its JSON."""
    regex: str | None = None
    """The whole text matches this regular expression."""
    choice: Sequence[str] | None = None
    """The text is one of these."""
    grammar: str | None = None
    """The text is one of this grammar, in the notation of Lark."""

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
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, _MAX_LOGPROBS)
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
        self._check_number()
        self._check_penalties()
        self._check_tokens()
        if self.timeout_s is not None:
            _check_float("timeout_s", self.timeout_s, "a number of seconds above 0", lambda value: value > 0)
        self._check_structure()

    def _check_number(self) -> None:
        _check_int("n", self.n, 1, _MAX_TEXTS)
        if self.best_of is not None:
            _check_int("best_of", self.best_of, 1, _MAX_TEXTS)
            if self.best_of < self.n:
                raise InvalidInput(f"best_of: found {self.best_of}, expected at least n, {self.n}")
        if self.num_candidates > 1 and self.is_greedy:
            name = "n" if self.n > 1 else "best_of"
            raise InvalidInput(
                f"{name}: found {self.num_candidates} with temperature 0, expected a temperature above 0: "
                "greedy texts are all alike"
            )

    def _check_penalties(self) -> None:
        for name, penalty in (
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ):
            _check_float(name, penalty, "a number from -2 to 2", lambda value: -2 <= value <= 2)
        _check_float(
            "repetition_penalty",
            self.repetition_penalty,
            "a number above 0, at most 10",
            lambda value: 0 < value <= 10,
        )

    def _check_tokens(self) -> None:
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        bad_words = (self.bad_words,) if isinstance(self.bad_words, str) else _tuple("bad_words", self.bad_words)
        object.__setattr__(self, "bad_words", bad_words)
        for word in bad_words:
            _check_text("bad_words", word)
        if self.allowed_token_ids is None:
            return
        object.__setattr__(self, "allowed_token_ids", _tuple("allowed_token_ids", self.allowed_token_ids))
        if not self.allowed_token_ids:
            raise InvalidInput("allowed_token_ids: found an empty list, expected at least one token")
        for token in self.allowed_token_ids:
            _check_int("allowed_token_ids", token, 0, None)
        if bad_words:
            raise InvalidInput("Found allowed_token_ids and bad_words, expected one of both")

    def _check_structure(self) -> None:
        asked = [name for name in _STRUCTURES if getattr(self, name) is not None]
        if len(asked) > 1:
            raise InvalidInput(f"Found {' and '.join(asked)}, expected at most one of: {', '.join(_STRUCTURES)}")
        if not asked:
            return
        # Each of these could cut a text before it is complete, or leave no token to go on with.
        cutting = ("stop", "stop_token_ids", "ignore_eos", "min_tokens", "bad_words", "allowed_token_ids")
        if wrong := [name for name in cutting if getattr(self, name)]:
            raise InvalidInput(f"Found {asked[0]} and {wrong[0]}, expected one of both: the text would not be complete")
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", check_schema(self.json_schema))
        if self.regex is not None:
            check_source("regex", self.regex)
        if self.choice is not None:
            object.__setattr__(self, "choice", check_choice(self.choice))
        if self.grammar is not None:
            check_source("grammar", self.grammar)

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

    @property
    def num_candidates(self) -> int:
        """Texts that are generated."""
        return self.n if self.best_of is None else self.best_of

    @property
    def is_structured(self) -> bool:
        """Whether the text has a form that is held token by token."""
        return any(getattr(self, name) is not None for name in _STRUCTURES)

    @property
    def has_penalties(self) -> bool:
        """Whether logits depend on the tokens before them."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def _tuple(name: str, values: object) -> tuple[Any, ...]:
    if isinstance(values, Sequence) and not isinstance(values, str | bytes):
        return tuple(values)
    raise InvalidInput(f"{name}: found {described(values)}, expected a list")


def _biases(given: object) -> dict[int, float]:
    if not isinstance(given, Mapping):
        raise InvalidInput(f"logit_bias: found {described(given)}, expected a mapping of tokens to numbers")
    if len(given) > _MAX_BIASES:
        raise InvalidInput(f"logit_bias: found {len(given)} tokens, expected at most {_MAX_BIASES}")
    biases: dict[int, float] = {}
    for token, bias in given.items():
        number = int(token) if isinstance(token, str) and token.isdecimal() and len(token) < 10 else token
        _check_int("logit_bias", number, 0, None)
        _check_float("logit_bias", bias, "numbers from -100 to 100", lambda value: -100 <= value <= 100)
        biases[number] = float(bias)
    return biases


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name}: found {described(value)}, expected true or false")


def _check_text(name: str, value: object) -> None:
    if not isinstance(value, str) or not value or not _is_text(value):
        raise InvalidInput(f"{name}: found {described(value)}, expected strings of at least one character")


def _is_text(value: str) -> bool:
    """Whether it has no half characters."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_int(name: str, value: object, least: int, most: int | None) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most):
        return
    expected = f"of at least {least}" if most is None else f"from {least} to {most}"
    raise InvalidInput(f"{name}: found {described(value)}, expected an integer {expected}")


def _check_float(name: str, value: object, expected: str, is_right: Any) -> None:
    try:
        # An integer may be larger than any float.
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:
        is_number = False
    if is_number and is_right(value):
        return
    raise InvalidInput(f"{name}: found {described(value)}, expected {expected}")
