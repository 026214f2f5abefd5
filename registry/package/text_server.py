"""What a package of format `generate` says of another server that writes its texts. Pure.

generate.runtime_url, runtime_key      -> checked when model.yaml is read
generate.runtime_fields, SamplingParams -> refused, before a job is queued, where the server would not obey
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Final

from penstock.registry.errors import InvalidInput

if TYPE_CHECKING:
    from penstock.registry.sampling_params import SamplingParams

__all__ = ["check_obeyed", "further_fields"]

_ALWAYS: Final = (
    *("max_tokens", "n", "temperature", "top_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "timeout_s"),
)
"""Fields that OpenAI's routes have. `timeout_s` is obeyed here."""
_CHATS: Final = ("json_schema",)
"""Fields that OpenAI's chats have beside these."""
_NEVER: Final = ("logprobs", "prompt_logprobs")
"""A server names tokens by their text, and a job's outputs name them by their ids."""


def further_fields() -> list[str]:
    """Fields that a package may say of its server."""
    from penstock.registry.sampling_params import SamplingParams

    return [field.name for field in fields(SamplingParams) if field.name not in (*_ALWAYS, *_NEVER)]


def check_obeyed(params: SamplingParams, further: Collection[str], *, is_chat: bool) -> None:
    """Raises InvalidInput for a field that has another value than its default and that the server does not obey.

    further: fields that the package says of its server.
    """
    from penstock.registry.sampling_params import SamplingParams

    obeyed = {*_ALWAYS, *further, *(_CHATS if is_chat else ())}
    plain: Any = SamplingParams()
    refused = [
        field.name
        for field in fields(params)
        if field.name not in obeyed and getattr(params, field.name) != getattr(plain, field.name)
    ]
    if refused:
        raise InvalidInput(
            f"{refused[0]}: found a value, expected none: the server of this model does not obey it. "
            f"Expected fields: {', '.join(field.name for field in fields(params) if field.name in obeyed)}"
        )
