"""The types of the settings' values, and how they are checked; settings_sections.py says which setting has which."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

from penstock.registry.broker.broker_url import parse_broker_url
from penstock.registry.errors import ConfigurationError, InvalidInput
from penstock.registry.patterns import compile_pattern
from penstock.registry.queues import parse_name
from penstock.registry.webhook_target import checked_url

__all__ = [
    "Currency",
    "DeviceName",
    "DiskBytes",
    "Edges",
    "Folder",
    "HeaderName",
    "HourlyRate",
    "KeyLabel",
    "ModelName",
    "RedisUrl",
    "Regex",
    "RouteRate",
    "Section",
    "WebhookUrl",
]

_LEAST_DISK_BYTES: Final = 4 << 20


def _redis_url(url: str) -> str:
    if url:
        try:
            parse_broker_url(url)
        except ConfigurationError as problem:
            raise ValueError(str(problem)) from None
    return url


def _disk_bytes(nbytes: int) -> int:
    if nbytes and nbytes < _LEAST_DISK_BYTES:
        raise ValueError(f"expected 0, or at least {_LEAST_DISK_BYTES} bytes")
    return nbytes


def _increasing(edges: tuple[float, ...]) -> tuple[float, ...]:
    if not edges or edges[0] <= 0 or any(low >= high for low, high in pairwise(edges)):
        raise ValueError("expected positive numbers of seconds in increasing order, such as 0.01,0.1,1")
    return edges


def _pattern(pattern: str) -> str:
    try:
        compile_pattern(pattern)
    except ConfigurationError as problem:
        raise ValueError(f"expected a regular expression of RE2: {problem}") from None
    return pattern


def _webhook_url(url: str) -> str:
    try:
        return checked_url(url)
    except InvalidInput as problem:
        raise ValueError(str(problem)) from None


def _matching(pattern: str, expected: str) -> AfterValidator:
    """Refuses a text that does not match as a whole."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(f"expected {expected}")
        return text

    return AfterValidator(check)


def _header_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]*", name):
        raise ValueError("expected the name of a header, such as x-real-ip")
    return name.lower()


def _model(name: str) -> str:
    return parse_name("model", name)


def _folder(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("expected a folder; its ~ names an unknown user") from None


RedisUrl = Annotated[str, AfterValidator(_redis_url)]
Folder = Annotated[Path, AfterValidator(_folder)]
Regex = Annotated[str, AfterValidator(_pattern)]
DiskBytes = Annotated[int, AfterValidator(_disk_bytes)]
# The key file separates labels by colons, and begins a comment with a number sign.
KeyLabel = Annotated[str, _matching(r"[^\s:#]+", "the label of a key, without spaces, : and #")]
HeaderName = Annotated[str, AfterValidator(_header_name)]
RouteRate = Annotated[str, _matching(r"/[^=\s]*=[1-9]\d{0,8}", "PATH=REQUESTS a minute, such as /v1/jobs=100")]
WebhookUrl = Annotated[str, AfterValidator(_webhook_url)]
HourlyRate = Annotated[
    str,
    _matching(r"[^=\s][^=]*=(?=.*[1-9])\d{1,6}(\.\d{1,6})?", "NAME=PRICE of one hour, above 0, such as A100_80GB=2.5"),
]
Currency = Annotated[str, _matching(r"[A-Z]{3}", "a code of ISO 4217, such as USD")]
DeviceName = Annotated[str, _matching(r"auto|cpu|cuda(:\d+)?", "auto, cpu, cuda or cuda:N")]
Edges = Annotated[tuple[float, ...], AfterValidator(_increasing)]
ModelName = Annotated[str, AfterValidator(_model)]


class Section(BaseModel):
    """A group of settings. Raises ValidationError for a name that it does not have."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, hide_input_in_errors=True, allow_inf_nan=False
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_booleans_as_numbers(cls, value: object, info: ValidationInfo) -> object:
        if isinstance(value, bool) and cls.model_fields[info.field_name or ""].annotation is not bool:
            raise ValueError("expected something other than a boolean")
        return value
