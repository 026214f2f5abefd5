"""The inputs of a job that generates text, as a caller writes them -> as they travel.

    {"prompt": "..."} + options=SamplingParams(...) -> with_options -> {"prompt": ["..."], "sampling_params": ['{...}']}
                                                    -> check_fits, against the served spec, before anything is queued

The sampling parameters travel as JSON, without the fields that have their default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from penstock.registry.errors import InvalidInput, described, shown
from penstock.registry.package.generation import PROMPT, SAMPLING, TOKEN_IDS
from penstock.registry.sampling_params import SamplingParams

if TYPE_CHECKING:
    from penstock.registry.package import ModelSpec

__all__ = ["as_inputs", "checked", "read_params", "with_options"]

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

    A prompt may be one text instead of a list of one, and token ids one list of integers.
    """
    given = dict(inputs)
    if (PROMPT in given) == (TOKEN_IDS in given):
        found = "both" if PROMPT in given else f"none of them: {', '.join(sorted(map(shown, given))) or 'no input'}"
        raise InvalidInput(f"Found {found}. Expected one of the inputs {PROMPT} and {TOKEN_IDS}")
    if isinstance(prompt := given.get(PROMPT), str):
        given[PROMPT] = [prompt]
    tokens = given.get(TOKEN_IDS)
    if isinstance(tokens, Sequence) and tokens and isinstance(tokens[0], int):
        given[TOKEN_IDS] = [tokens]
    if isinstance(sampling := given.get(SAMPLING), Mapping | SamplingParams):
        params = SamplingParams.from_mapping(sampling) if isinstance(sampling, Mapping) else sampling
        given[SAMPLING] = [_json(params)]
    elif isinstance(sampling, str):
        given[SAMPLING] = [sampling]
    _check_fits(spec, given)
    return given


def read_params(inputs: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters of a job. Raises InvalidInput."""
    if SAMPLING not in inputs:
        return SamplingParams()
    found = inputs[SAMPLING]
    text = found[0] if len(found) == 1 else None
    if not isinstance(text, str) or len(text) > _MOST_JSON:
        raise InvalidInput(f"{SAMPLING}: expected one text of JSON, at most {_MOST_JSON} characters")
    try:
        options = json.loads(text)
    except (ValueError, RecursionError):
        raise InvalidInput(f"{SAMPLING}: found a text that is no JSON, expected an object of sampling fields") from None
    if not isinstance(options, dict):
        raise InvalidInput(f"{SAMPLING}: found {described(options)}, expected an object of sampling fields")
    return SamplingParams.from_mapping(options)


def _check_fits(spec: ModelSpec, inputs: Mapping[str, Any]) -> None:
    """Tokens of a text are known to the worker only: it checks them again."""
    most = read_params(inputs).max_tokens
    limit = spec.generate.max_model_len if spec.generate is not None else None
    if limit is None:
        return
    tokens = inputs.get(TOKEN_IDS)
    number = len(tokens[0]) if isinstance(tokens, Sequence) and tokens and isinstance(tokens[0], Sequence) else 1
    if number + most > limit:
        raise InvalidInput(
            f"Found a prompt of at least {number} tokens and max_tokens {most}. Expected at most {limit} together "
            "(max_model_len)"
        )


def _json(params: SamplingParams) -> str:
    chosen = {field.name: getattr(params, field.name) for field in fields(params)}
    plain = SamplingParams()
    return json.dumps({name: value for name, value in chosen.items() if value != getattr(plain, name)})
