"""What model.yaml says of a package of format `generate`, and the signature that all such packages have.

    model.yaml, format: generate -> with_signature: inputs, outputs, streams -> ModelSpec
               section generate  -> Generation: the options of the engine

Pure values: no file is read here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import numpy as np
from pydantic import AfterValidator, Field, model_validator

from penstock.registry.package.spec_sections import Section
from penstock.registry.package.text_server import RuntimeKind, further_fields
from penstock.registry.tensors import Array

__all__ = [
    "GENERATE",
    "MESSAGES",
    "MOST_GUESSES",
    "MOST_SEATS",
    "MOST_TOKENS",
    "PROFILES",
    "PROFILE_SIZES",
    "PROMPT",
    "SAMPLING",
    "TOKEN_IDS",
    "TOOLS",
    "USAGE",
    "Generation",
    "example_inputs",
    "with_signature",
]

PROMPT: Final = "prompt"
TOKEN_IDS: Final = "prompt_token_ids"  # noqa: S105 - the name of an input
MESSAGES: Final = "messages"
TOOLS: Final = "tools"
SAMPLING: Final = "sampling_params"
USAGE: Final = "usage"
"""An output: tokens of the prompt, generated tokens, and those of the prompt that were not computed anew."""

GENERATE: Final = "generate"
"""The format whose model writes text, token by token."""
MOST_SEATS: Final = 64
"""Each running request has a thread of the worker."""
_MOST_URGENT: Final = 16
MOST_TOKENS: Final = 1 << 20
"""Of a prompt and its text together."""
MOST_GUESSES: Final = 64
_LONGEST_TEMPLATE: Final = 1 << 15
_OF_CHATS: Final = ("chat_template", "tool_parser")
"""Fields that each chat takes; the engine has no such options."""
PROFILES: Final[dict[str, dict[str, Any]]] = {
    "gpu": {"max_model_len": 4096, "max_num_seqs": 32, "page_size": 64, "hbm_utilization": 0.85},
    "memory_constrained": {"max_model_len": 2048, "max_num_seqs": 8, "page_size": 32},
}
"""Values that a package takes together. Its own values come first."""
PROFILE_SIZES: Final[dict[str, dict[str, dict[str, float]]]] = {
    "memory_constrained": {"cpu": {"kv_cache_mb": 64.0}, "cuda": {"hbm_utilization": 0.7}},
}
"""The sizes of those profiles whose pages the engine's device decides."""
_SIZES: Final = ("kv_cache_mb", "hbm_utilization")
"""Of the pages; a package has one of both."""
_INPUTS: Final = (
    {"name": PROMPT, "dtype": "string", "shape": [1], "optional": True},
    {"name": TOKEN_IDS, "dtype": "int64", "shape": [1, "prompt_tokens"], "optional": True},
    {"name": MESSAGES, "dtype": "string", "shape": [1], "optional": True},
    {"name": TOOLS, "dtype": "string", "shape": [1], "optional": True},
    {"name": SAMPLING, "dtype": "string", "shape": [1], "optional": True},
)
_OUTPUTS: Final = (
    {"name": "text", "dtype": "string", "shape": ["choices"]},
    {"name": "token_ids", "dtype": "int64", "shape": ["choices", "tokens"]},
    {"name": "finish_reason", "dtype": "string", "shape": ["choices"]},
    {"name": USAGE, "dtype": "int64", "shape": [3]},
    {"name": "logprobs", "dtype": "string", "shape": ["choices"]},
    {"name": "message", "dtype": "string", "shape": ["choices"]},
    {"name": "prompt_logprobs", "dtype": "string", "shape": [1]},
)


_LONGEST: Final = 2048
_EXPECTED: Final = "expected the address of a server, such as http://127.0.0.1:8000"
_VARIABLE: Final = re.compile(r"[A-Z][A-Z0-9_]{0,63}_RUNTIME_KEY\Z")


def _server_url(url: str) -> str:
    """The URL without `/v1` at its end, which is added. A URL may hold a secret, so no message has it."""
    if not re.fullmatch(rf"[!-~]{{1,{_LONGEST}}}", url) or "\\" in url:
        raise ValueError(f"found a text that is no URL, {_EXPECTED}")
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or parts.scheme not in ("http", "https"):
        raise ValueError(f"found a text that is no URL of http or https, {_EXPECTED}")
    if "@" in parts.netloc or parts.query or parts.fragment:
        raise ValueError(f"found a URL with a user, a query or a fragment, {_EXPECTED}; runtime_key names a key")
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def _key_variable(name: str) -> str:
    """Only variables that are made for this: a package must not send another secret of the worker to a server."""
    if not _VARIABLE.match(name) or name.startswith("PENSTOCK_"):
        raise ValueError(f"found {name!r:.80}, expected the name of a variable that ends with _RUNTIME_KEY")
    return name


def _served_field(name: str) -> str:
    if name not in (known := further_fields()):
        raise ValueError(f"found {name!r:.80}, expected sampling fields beyond those of OpenAI: {', '.join(known)}")
    return name


ServerUrl = Annotated[str, AfterValidator(_server_url)]
KeyVariable = Annotated[str, AfterValidator(_key_variable)]
ServedField = Annotated[str, AfterValidator(_served_field)]


class Generation(Section):
    """The engine of a `generate` package. null: as the engine says."""

    profile: Literal["gpu", "memory_constrained"] | None = None
    """Values that are taken together: max_model_len, max_num_seqs, page_size, kv_cache_mb or hbm_utilization."""
    max_model_len: Annotated[int | None, Field(ge=2, le=MOST_TOKENS)] = None
    """Most tokens of a prompt and its output together; null: as many as the model knows positions."""
    max_num_seqs: Annotated[int, Field(ge=1, le=MOST_SEATS)] = 16
    """Most requests that run at a time."""
    max_num_batched_tokens: Annotated[int | None, Field(ge=1, le=MOST_TOKENS)] = None
    """Most tokens of a step; a longer prompt is computed in chunks, beside the other requests; null: 512, and 2048 on a
    GPU."""
    max_long_prefill_tokens: Annotated[int | None, Field(ge=1, le=MOST_TOKENS)] = None
    """Most tokens of a step, while others decode, of a prompt that has more than four times as many; null: 64, and 2048
    on a GPU."""
    num_speculative_tokens: Annotated[int, Field(ge=0, le=MOST_GUESSES)] = 3
    """Most tokens that are guessed for each of at most two running greedy requests; 0 is off."""
    page_size: Annotated[int, Field(ge=1, le=MOST_TOKENS)] = 16
    """Tokens in a page of keys and values."""
    kv_cache_mb: Annotated[float | None, Field(gt=0)] = None
    """Megabytes of all pages together; null: 256 on a CPU, and on a GPU what hbm_utilization leaves."""
    hbm_utilization: Annotated[float | None, Field(gt=0, le=1)] = None
    """The share of a GPU's memory that weights, forwards and pages take together; null: 0.9, without kv_cache_mb."""
    enable_prefix_caching: bool = True
    """Whether requests of one tenant with equal beginnings share pages."""
    prefix_cache_capacity: Annotated[float, Field(ge=0, le=1)] = 0.3
    """The largest share of the pages that is kept for later requests."""
    ageing_steps: Annotated[int, Field(ge=1)] = 256
    """Steps after which a waiting request rises by one priority."""
    joined_linears: Literal["auto", "on", "off"] = "auto"
    """Layers of one input (queries, keys and values; gate and up) are one product; auto: on a GPU."""
    packed_linears: Literal["auto", "on", "off"] = "auto"
    """Weights in oneDNN's layout; auto: where they are measured to be faster."""
    attention: Literal["auto", "sdpa", "triton"] = "auto"
    """Of decoding rows: sdpa over gathered pages, or a kernel in triton; auto: the kernel where it can run."""
    cuda_graphs: bool = True
    """On a GPU with the kernel, one launch for all kernels of a step in which every row decodes."""
    compile_decoding: bool = False
    """The model in these graphs is compiled: faster steps, and a load that takes longer."""
    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Launch a step of decoding rows before the tokens of the last one are read; auto: on a GPU."""
    chat_template: Annotated[str | None, Field(min_length=1, max_length=_LONGEST_TEMPLATE)] = None
    """A template of Jinja that makes a prompt of messages; null: that of the tokenizer."""
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    """The form of calls of tools in a text; null: that which the template shows."""
    runtime_url: ServerUrl | None = None
    """Another server, of runtime_kind, that writes the texts; null: our engine does."""
    runtime_model: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    """The name of the model at that server; null: that of the package."""
    runtime_key: KeyVariable | None = None
    """The environment variable of the worker with the server's API key; its name ends with _RUNTIME_KEY."""
    runtime_kind: RuntimeKind = "openai"
    """Which server it is: it says which sampling fields are obeyed, and by which names they are sent."""
    runtime_fields: Annotated[tuple[ServedField, ...], Field(strict=False, max_length=32)] = ()
    """Sampling fields that the server obeys beyond those of OpenAI, such as top_k and min_p."""
    runtime_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 60.0
    """Seconds that a job waits for the server: for the next bytes, and while it is away."""

    @model_validator(mode="before")
    @classmethod
    def _takes_profile(cls, fields: Any) -> Any:
        name = fields.get("profile") if isinstance(fields, Mapping) else None
        values = PROFILES.get(name, {}) if isinstance(name, str) else {}
        if values and any(fields.get(each) is not None for each in _SIZES):
            values = {each: value for each, value in values.items() if each not in _SIZES}
        return {**values, **fields} if values else fields

    @model_validator(mode="after")
    def _fits_together(self) -> Generation:
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens: found {self.max_num_batched_tokens}, expected at least max_num_seqs, "
                f"{self.max_num_seqs}: each running request needs a token of the step"
            )
        if None not in (self.kv_cache_mb, self.hbm_utilization):
            raise ValueError("found kv_cache_mb and hbm_utilization, expected one of both")
        return self

    @model_validator(mode="after")
    def _has_one_runtime(self) -> Generation:
        # A stored spec has all fields, so those with their defaults do not count.
        given = [name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default]
        wrong = [name for name in given if _is_remote(name) != (self.runtime_url is not None)]
        if self.runtime_url is None and wrong:
            raise ValueError(f"{wrong[0]}: found without runtime_url, expected both or none")
        if self.runtime_kind == "tgi" and self.runtime_fields:
            raise ValueError("runtime_fields: found some beside runtime_kind tgi, expected none: its fields are known")
        if wrong := [name for name in wrong if name not in ("max_model_len", "max_num_seqs")]:
            raise ValueError(f"{wrong[0]}: found beside runtime_url, expected none: the server has its own engine")
        return self

    @property
    def urgent_seats(self) -> int:
        """Jobs beyond `max_num_seqs` that a worker takes where they are more urgent than a running one."""
        return min(self.max_num_seqs, _MOST_URGENT)

    def engine_options(self) -> dict[str, Any]:
        """The options by the names of `Engine.from_pretrained`."""
        own = self.model_dump(exclude=set(_OF_CHATS))
        return {name: value for name, value in own.items() if not _is_remote(name)}


def _is_remote(name: str) -> bool:
    return name.startswith("runtime_")


def example_inputs() -> dict[str, Array]:
    """A job that every model can run: a prompt of one token, and one token of text."""
    return {
        TOKEN_IDS: np.zeros((1, 1), np.int64),
        SAMPLING: np.array(['{"max_tokens": 1, "temperature": 0}'], object),
    }


def with_signature(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a `generate` package with its inputs and outputs, which are always the same.

    Raises ValueError where the package declares its own.
    """
    own = {"inputs": _INPUTS, "outputs": _OUTPUTS}
    for name, tensors in own.items():
        if name in fields and not _is_like(fields[name], tensors):
            raise ValueError(f"{name}: found some, expected none for format {GENERATE}: it has {name} of its own")
    return {**fields, **own, "streams": True}


def _is_like(given: Any, own: tuple[dict[str, Any], ...]) -> bool:
    """Whether these are the tensors as a stored spec has them."""
    names = [one.get("name") for one in given if isinstance(one, Mapping)] if isinstance(given, list | tuple) else []
    return names == [one["name"] for one in own]
