"""What a package of format `generate` says of another server that writes its texts. Pure.

generate.runtime_kind, runtime_fields -> the fields that the server obeys
these fields, a job's inputs          -> refused, before a job is queued, where the server would not obey

    openai  the fields of OpenAI's routes, and runtime_fields
    vllm    those of vLLM beyond OpenAI's, too
    tgi     those of TGI's own route for prompts; its chats obey fewer. It has no others, so runtime_fields is empty
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from penstock.registry.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.registry.sampling_params import SamplingParams

__all__ = ["RuntimeKind", "ServerOptions", "check_obeyed", "further_fields"]

RuntimeKind = Literal["openai", "vllm", "tgi"]


class ServerOptions(Protocol):
    """What a package says of its server."""

    @property
    def runtime_kind(self) -> RuntimeKind: ...
    @property
    def runtime_fields(self) -> Collection[str]: ...


_OPENAI: Final = (
    *("max_tokens", "n", "temperature", "top_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "timeout_s"),
)
"""Fields that OpenAI's routes have. `timeout_s` is obeyed here."""
_VLLM: Final = (
    *_OPENAI,
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "min_tokens", "allowed_token_ids"),
    *("json_schema", "regex", "choice", "grammar"),
)
_TGI_CHATS: Final = ("max_tokens", "temperature", "top_p", "seed", "stop", "timeout_s", "json_schema", "regex")
"""TGI reads n and logit_bias without effect, makes presence_penalty a repetition penalty, and counts the prompt in
frequency_penalty."""
_OBEYED: Final[dict[RuntimeKind, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    "openai": (_OPENAI, (*_OPENAI, "json_schema")),
    "vllm": (_VLLM, _VLLM),
    "tgi": ((*_TGI_CHATS, "top_k", "repetition_penalty"), _TGI_CHATS),
}
"""(of prompts, of chats)."""
_NEVER: Final = ("logprobs", "prompt_logprobs")
"""A server names tokens by their text, and a job's outputs name them by their ids."""
_FORMS: Final = ("json_schema", "regex")


def further_fields() -> list[str]:
    """Fields that a package may say of its server."""
    from penstock.registry.sampling_params import SamplingParams

    return [field.name for field in fields(SamplingParams) if field.name not in (*_OPENAI, *_NEVER)]


def check_obeyed(
    params: SamplingParams,
    options: ServerOptions,
    *,
    is_chat: bool,
    has_tools: bool = False,
    has_token_ids: bool = False,
) -> None:
    """Raises InvalidInput for a field that has another value than its default and that the server does not obey.

    options: of the package. The others say which inputs the job has.
    """
    given = _changed(params)
    obeyed = {*_OBEYED[options.runtime_kind][is_chat], *options.runtime_fields}
    if refused := [name for name in given if name not in obeyed]:
        raise InvalidInput(
            f"{refused[0]}: found a value, expected none: the server of this model does not obey it. "
            f"Expected fields: {', '.join(field.name for field in fields(params) if field.name in obeyed)}"
        )
    if options.runtime_kind == "tgi":
        _check_tgi(given, has_tools=has_tools, has_token_ids=has_token_ids)


def _changed(params: SamplingParams) -> list[str]:
    """The fields that have another value than their default."""
    from penstock.registry.sampling_params import SamplingParams

    plain: Any = SamplingParams()
    return [field.name for field in fields(params) if getattr(params, field.name) != getattr(plain, field.name)]


def _check_tgi(given: Collection[str], *, has_tools: bool, has_token_ids: bool) -> None:
    if has_token_ids:
        raise InvalidInput("prompt_token_ids: found some, expected prompt: the server of this model, TGI, takes texts")
    if has_tools and (forms := [name for name in _FORMS if name in given]):
        raise InvalidInput(f"{forms[0]}: found beside tools, expected one of both: TGI obeys one of them")
