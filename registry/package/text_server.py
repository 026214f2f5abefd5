"""What a package of format `generate` says of another server that writes its texts. Pure.

generate.runtime_url, runtime_key      -> checked when model.yaml is read
generate.runtime_fields, SamplingParams -> refused, before a job is queued, where the server would not obey
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import fields
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from pydantic import AfterValidator

from penstock.registry.errors import InvalidInput
from penstock.registry.sampling_params import SamplingParams

__all__ = ["KeyVariable", "ServedField", "ServerUrl", "check_obeyed"]

_ALWAYS: Final = (
    *("max_tokens", "n", "temperature", "top_p", "seed", "stop"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "timeout_s"),
)
"""Fields that OpenAI's routes have. `timeout_s` is obeyed here."""
_CHATS: Final = ("json_schema",)
"""Fields that OpenAI's chats have beside these."""
_NEVER: Final = ("logprobs", "prompt_logprobs")
"""A server names tokens by their text, and a job's outputs name them by their ids."""
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
    known = [field.name for field in fields(SamplingParams) if field.name not in (*_ALWAYS, *_NEVER)]
    if name not in known:
        raise ValueError(f"found {name!r:.80}, expected sampling fields beyond those of OpenAI: {', '.join(known)}")
    return name


ServerUrl = Annotated[str, AfterValidator(_server_url)]
KeyVariable = Annotated[str, AfterValidator(_key_variable)]
ServedField = Annotated[str, AfterValidator(_served_field)]


def check_obeyed(params: SamplingParams, further: Collection[str], *, is_chat: bool) -> None:
    """Raises InvalidInput for a field that has another value than its default and that the server does not obey.

    further: fields that the package says of its server.
    """
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
            f"Expected fields: {', '.join(name for name in _ordered(obeyed))}"
        )


def _ordered(names: Collection[str]) -> list[str]:
    return [field.name for field in fields(SamplingParams) if field.name in names]
