"""The inputs of a job that generates text, as a caller writes them -> as they travel.

    {"prompt": "..."} + options=SamplingParams(...) -> with_options -> {"prompt": ["..."], "sampling_params": ['{...}']}
                                                    -> checked, against the served spec, before anything is queued
    {"messages": [...], "tools": [...]}             -> {"messages": ['[...]'], "tools": ['[...]']}

Messages and tools travel as JSON, and so do the sampling parameters, without the fields that have their default.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from penstock.registry.chat_messages import checked_messages, checked_tools
from penstock.registry.errors import InvalidInput, described, shown
from penstock.registry.package.generation import MESSAGES, PROMPT, SAMPLING, TOKEN_IDS, TOOLS
from penstock.registry.package.text_server import check_obeyed
from penstock.registry.sampling_params import SamplingParams

if TYPE_CHECKING:
    from penstock.registry.package import ModelSpec

__all__ = ["as_inputs", "checked", "is_deterministic", "read_chat", "read_params", "with_limit", "with_options"]

_PROMPTS: Final = (PROMPT, TOKEN_IDS, MESSAGES)
_MOST_JSON: Final = 1 << 20


def with_options(inputs: object, options: SamplingParams | Mapping[str, Any] | None) -> Any:
    """The inputs with their sampling parameters. Raises InvalidInput for unknown parameters, or out of range."""
    if options is None:
        return inputs
    if not isinstance(inputs, Mapping):
        raise InvalidInput(f"Inputs are {described(inputs)}. Expected a mapping beside options")
    if SAMPLING in inputs:
        raise InvalidInput(f"options: found beside the input {SAMPLING}, expected one of them")
    if isinstance(options, Mapping):
        options = SamplingParams.from_mapping(options)
    if not isinstance(options, SamplingParams):
        raise InvalidInput(f"options: found {described(options)}, expected SamplingParams or a mapping of its fields")
    return {**inputs, SAMPLING: [_json(options)]}


def as_inputs(prompt: object) -> dict[str, Any]:
    """The input of one prompt: a text, or its token ids. Raises InvalidInput for anything else."""
    if isinstance(prompt, str):
        return {PROMPT: prompt}
    if isinstance(prompt, Mapping):
        return dict(prompt)
    if isinstance(prompt, Sequence) and not isinstance(prompt, bytes):
        return {TOKEN_IDS: [list(prompt)]}
    raise InvalidInput(f"Found {described(prompt)} as a prompt, expected a text or a list of token ids")


def checked(spec: ModelSpec, inputs: Mapping[str, object]) -> dict[str, object]:
    """The inputs of one job as the signature declares them. Raises InvalidInput for what can never run.

    A prompt may be one text instead of a list of one, token ids one list of integers, and messages and tools the lists
    themselves.
    """
    given = dict(inputs)
    prompts = [name for name in _PROMPTS if name in given]
    if len(prompts) != 1:
        found = " and ".join(prompts) or f"none of them: {', '.join(sorted(map(shown, given))) or 'no input'}"
        raise InvalidInput(f"Found {found}. Expected one of the inputs {', '.join(_PROMPTS)}")
    if TOOLS in given and MESSAGES not in given:
        raise InvalidInput(f"Found {TOOLS} beside {prompts[0]}. Expected {TOOLS} beside {MESSAGES}")
    if isinstance(prompt := given.get(PROMPT), str):
        given[PROMPT] = [prompt]
    if TOKEN_IDS in given:
        given[TOKEN_IDS] = _token_rows(given[TOKEN_IDS])
    for name, check in ((MESSAGES, checked_messages), (TOOLS, checked_tools)):
        if name in given:
            given[name] = [_checked_json(name, given[name], check)]
    if isinstance(sampling := given.get(SAMPLING), Mapping | SamplingParams):
        params = SamplingParams.from_mapping(sampling) if isinstance(sampling, Mapping) else sampling
        given[SAMPLING] = [_json(params)]
    elif isinstance(sampling, str):
        given[SAMPLING] = [sampling]
    _check_fits(spec, given)
    return given


def with_limit(spec: ModelSpec, most_tokens: int) -> ModelSpec:
    """The spec of a model that has room for so many tokens of a prompt and its text."""
    generate = spec.generate
    if generate is None or generate.max_model_len == most_tokens:
        return spec
    return spec.model_copy(update={"generate": generate.model_copy(update={"max_model_len": most_tokens})})


def read_chat(inputs: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Mapping[str, Any]]] | None:
    """(messages, tools) of a job; None: it has a prompt. Raises InvalidInput."""
    if MESSAGES not in inputs:
        return None
    tools = checked_tools(_read(inputs, TOOLS, "a list")) if TOOLS in inputs else []
    return checked_messages(_read(inputs, MESSAGES, "a list")), tools


def read_params(inputs: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a job. Raises InvalidInput."""
    if SAMPLING not in inputs:
        return SamplingParams()
    options = _read(inputs, SAMPLING, "an object of sampling fields")
    if not isinstance(options, dict):
        raise InvalidInput(f"{SAMPLING}: found {described(options)}, expected an object of sampling fields")
    return SamplingParams.from_mapping(options)


def is_deterministic(inputs: Mapping[str, Any]) -> bool:
    """Whether equal inputs give equal texts: the job is greedy, or it names a seed. No other field is checked."""
    if SAMPLING not in inputs:
        return False
    try:
        options = _read(inputs, SAMPLING, "an object of sampling fields")
    except InvalidInput:
        return False
    return isinstance(options, dict) and (options.get("temperature") == 0 or options.get("seed") is not None)


def _checked_json(name: str, given: object, check: Callable[[object], object]) -> str:
    """The JSON of messages or tools that pass. Jobs of other programs have the JSON already."""
    if isinstance(given, Sequence) and len(given) == 1 and isinstance(given[0], str):
        given = _read({name: given}, name, "a list")
    check(given)
    try:
        return json.dumps(given, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidInput(
            f"{name}: found values that JSON has not, expected texts, numbers, lists and mappings"
        ) from None


def _read(inputs: Mapping[str, Any], name: str, expected: str) -> Any:
    """The value of an input that travels as JSON. Raises InvalidInput."""
    found = inputs[name]
    text = found[0] if len(found) == 1 else None
    if not isinstance(text, str) or len(text) > _MOST_JSON:
        raise InvalidInput(f"{name}: expected one text of JSON, at most {_MOST_JSON} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"{name}: found a text that is no JSON, expected {expected}") from None


def _check_fits(spec: ModelSpec, inputs: Mapping[str, Any]) -> None:
    """Tokens of a text are known to the worker only: it checks them again."""
    params = read_params(inputs)
    if spec.generate is not None and spec.generate.runtime_url is not None:
        is_chat, has_tools, has_token_ids = (name in inputs for name in (MESSAGES, TOOLS, TOKEN_IDS))
        check_obeyed(params, spec.generate, is_chat=is_chat, has_tools=has_tools, has_token_ids=has_token_ids)
    most = params.max_tokens
    limit = spec.generate.max_model_len if spec.generate is not None else None
    if limit is None:
        return
    # A text, and a chat, have one token at least.
    number = max(1, _num_tokens(inputs[TOKEN_IDS])) if TOKEN_IDS in inputs else 1
    if number + most > limit:
        raise InvalidInput(
            f"Found a prompt of at least {number} tokens and max_tokens {most}. Expected at most {limit} together "
            "(max_model_len, or the pages of kv_cache_mb)"
        )


def _token_rows(tokens: Any) -> Any:
    """One row of tokens where they were given without it. What is no row is left to the signature."""
    if isinstance(tokens, np.ndarray):
        return tokens[None] if tokens.ndim == 1 else tokens
    is_row = isinstance(tokens, Sequence) and len(tokens) > 0 and isinstance(tokens[0], int | np.integer)
    return [tokens] if is_row else tokens


def _num_tokens(rows: Any) -> int:
    """Tokens of the prompt, of lists and of arrays of any library; 0 for what has no such form."""
    if isinstance(shape := getattr(rows, "shape", None), tuple):
        return int(shape[-1]) if shape else 0
    if isinstance(rows, Sequence) and not isinstance(rows, str | bytes) and len(rows) > 0:
        row = rows[0]
        return len(row) if isinstance(row, Sequence | np.ndarray) and not isinstance(row, str | bytes) else 0
    return 0


def _json(params: SamplingParams) -> str:
    chosen = {field.name: getattr(params, field.name) for field in fields(params)}
    plain = SamplingParams()
    return json.dumps({name: value for name, value in chosen.items() if value != getattr(plain, name)})
