"""The form that a text must have -> which tokens may come next.

    json_schema, regex, choice, grammar -> compiled once -> a matcher for each request
    the request's tokens so far         -> matcher       -> (V,) tokens that would leave the form

A matcher follows the tokens of its request, so a request that another worker takes over gets the same masks.
JSON is written with one space after commas and colons: with free white space a weak model may write nothing else.

Importing this module imports torch; the first form imports llguidance.
"""

from __future__ import annotations

import importlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np
import torch

from penstock.registry.errors import InvalidInput, MissingRequirement, shown
from penstock.registry.sampling_params import SamplingParams

__all__ = ["StructureCompiler", "TextMatcher"]

_MAX_COMPILED: Final = 64
_JSON: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class TextMatcher:
    """The form of one text, and how far the text has come in it. name: of the sampling field with the form."""

    def __init__(self, matcher: Any, vocab_size: int, name: str) -> None:
        self._name: Final = name
        self._matcher: Final = matcher
        self._vocab_size: Final = vocab_size
        self._read = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """tokens: all of the output. Only those that are new since the last call are read."""
        new, self._read = list(tokens[self._read :]), len(tokens)
        if new:
            self._matcher.consume_tokens(new)

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and nothing can follow."""
        return bool(self._matcher.is_stopped()) and not self.is_broken

    @property
    def is_broken(self) -> bool:
        """Whether the text left its form, or the form took more memory or time than is allowed."""
        return bool(self._matcher.is_error())

    @property
    def failure(self) -> InvalidInput:
        """The error of a request whose form is broken."""
        # Further lines repeat the text.
        reason = shown(str(self._matcher.get_error()).partition("\n")[0])
        return InvalidInput(f"{self._name}: {reason}, expected a form that takes less memory and time")

    def forbidden(self) -> torch.Tensor:
        """(V,) bool: tokens that may not come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, count=min(self._vocab_size, 8 * len(bits)), bitorder="little")
        forbidden = torch.ones(self._vocab_size, dtype=torch.bool)
        forbidden[: len(allowed)] = torch.from_numpy(allowed == 0)
        return forbidden

    def copy(self) -> TextMatcher:
        """The same form, for another text of the request."""
        copied = TextMatcher(self._matcher.deep_copy(), self._vocab_size, self._name)
        copied._read = self._read
        return copied


class StructureCompiler:
    """The forms of one tokenizer. Any thread may compile."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos: Iterable[int]) -> None:
        self._tokenizer: Final = tokenizer
        self._vocab_size: Final = vocab_size
        self._eos: Final = frozenset(eos)
        self._lock: Final = threading.Lock()
        self._vocabulary: Any = None
        self._compiled: OrderedDict[tuple[str, str], Any] = OrderedDict()

    def matcher(self, params: SamplingParams) -> TextMatcher:
        """For a new text. A form is compiled once, as long as it is among the last ones.

        Raises InvalidInput for a form that cannot be compiled, and MissingRequirement without llguidance.
        """
        library = _library()
        key = _source(params)
        with self._lock:
            compiled = self._compiled.get(key)
            if compiled is None:
                compiled = self._compiled[key] = self._compile(library, *key)
                if len(self._compiled) > _MAX_COMPILED:
                    self._compiled.popitem(last=False)
            self._compiled.move_to_end(key)
            return TextMatcher(compiled.deep_copy(), self._vocab_size, key[0])

    def _compile(self, library: Any, name: str, source: str) -> Any:
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary(library)
        try:
            if name == "json_schema":
                grammar = library.LLMatcher.grammar_from_json_schema(source, overrides=_JSON)
            else:
                grammar = library.grammar_from({"grammar": "lark"}.get(name, name), source)
        except ValueError as error:
            raise InvalidInput(f"{name}: {shown(error)}, expected one that can be compiled") from error
        is_wrong, messages = library.LLMatcher.validate_grammar_with_warnings(grammar, self._vocabulary)
        matcher = None if is_wrong else library.LLMatcher(self._vocabulary, grammar, log_level=0)
        if matcher is None or matcher.is_error():
            reason = messages[0] if matcher is None else matcher.get_error()
            raise InvalidInput(f"{name}: {_line(reason)}, expected one that can be compiled")
        return matcher

    def _read_vocabulary(self, library: Any) -> Any:
        ends = sorted(self._eos) or [each for each in (self._tokenizer.eos_token_id,) if each is not None]
        if not ends:
            raise InvalidInput("Found a model without an end token, expected one: a structured text needs it")
        if not getattr(self._tokenizer, "is_fast", False):
            raise InvalidInput("Found a slow tokenizer, expected a fast one for structured text")
        bridge = importlib.import_module("llguidance.hf")
        size = max(self._vocab_size, len(self._tokenizer))
        return bridge.from_tokenizer(self._tokenizer, n_vocab=size, eos_token=ends)


def _library() -> Any:
    try:
        return importlib.import_module("llguidance")
    except ImportError as error:
        raise MissingRequirement("Structured text needs llguidance, expected the extra `generate`") from error


def _source(params: SamplingParams) -> tuple[str, str]:
    if params.json_schema is not None:
        return "json_schema", json.dumps(params.json_schema)
    if params.choice is not None:
        return "choice", json.dumps(list(params.choice))
    if params.regex is not None:
        return "regex", params.regex
    return "grammar", params.grammar or ""


def _line(message: str) -> str:
    """A message of the compiler, without the drawing below it."""
    lines = [line.strip() for line in message.splitlines()]
    told = [line for line in lines if line.startswith("error:")] or [line for line in lines if line]
    return shown(" ".join(dict.fromkeys((told[0], told[-1])))) if told else "an error without a message"
