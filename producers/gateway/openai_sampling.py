"""The fields of OpenAI's text routes that say how a text is generated -> SamplingParams.

Fields that other servers have beside OpenAI's, such as `top_k` and `min_p`, are read, too.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import msgspec

from penstock.producers.gateway.default_model import generates, or_default
from penstock.producers.gateway.fleet import GatewayClient
from penstock.registry.errors import InvalidInput
from penstock.registry.package import ModelSpec
from penstock.registry.queues import PriorityName
from penstock.registry.sampling_params import SamplingParams

__all__ = ["Sampling", "SamplingFields", "StreamOptions", "generating_spec", "sampling_of"]

_SAME_NAME: Final = (
    *("temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "ignore_eos", "min_tokens"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "bad_words", "allowed_token_ids"),
    *("logit_bias", "json_schema", "regex", "choice", "grammar", "timeout_s"),
)


class StreamOptions(msgspec.Struct, kw_only=True):
    """include_usage: the last chunk of a stream has the tokens of the whole request."""

    include_usage: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What both routes have. Null is the same as a missing field."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    timeout_s: float | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    priority: PriorityName | None = None

    @property
    def tells_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True


class Sampling(NamedTuple):
    """How the texts of a request are generated. choices: texts for each prompt."""

    params: SamplingParams
    choices: int


async def generating_spec(client: GatewayClient, model: str) -> ModelSpec:
    """The spec of a model that generates texts. `default`: the only one that is served.

    Raises UnknownModel, and InvalidInput for a model that generates none.
    """
    spec = await client.spec_of(await or_default(client, model, generates, "generate text"))
    if not generates(spec):
        raise InvalidInput(f"{spec.name} generates no text. Expected a model of format generate")
    return spec


def sampling_of(fields: SamplingFields, max_tokens: int, **more: Any) -> Sampling:
    """more: further fields of SamplingParams. Raises InvalidInput for values out of their range."""
    wishes: dict[str, Any] = {"max_tokens": max_tokens, **more}
    for name in _SAME_NAME:
        if (value := getattr(fields, name)) is not None:
            wishes[name] = value
    choices = 1 if fields.n is None else fields.n
    if choices < 1:
        raise InvalidInput(f"n is {choices}. Expected 1 or more")
    return Sampling(SamplingParams.from_mapping(wishes), choices)
