"""The configuration of an engine, in three objects: cache, scheduler, and both with the model's own.

keywords of Engine.from_pretrained -> Config -> checked before a model is loaded
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Literal

from penstock.registry.errors import ConfigurationError, described, shown
from penstock.registry.package.generation import PROFILE_SIZES, PROFILES

__all__ = ["AttentionChoice", "CacheConfig", "Config", "Precision", "SchedulerConfig"]

Precision = Literal["fp32", "bf16"]
AttentionChoice = Literal["auto", "sdpa", "triton"]
_ATTENTION: Final = ("auto", "sdpa", "triton")
_PRECISIONS: Final = ("fp32", "bf16")
_SWITCH: Final = ("auto", "on", "off")
_SIZES: Final = ("kv_cache_mb", "hbm_utilization")
_DEVICE: Final = re.compile(r"cpu|cuda(:[0-9]{1,3})?")


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """Pages of keys and values."""

    page_size: int = 16
    """Tokens in a page."""
    kv_cache_mb: float | None = None
    """Megabytes (10**6 bytes) of all pages together. None: 256 on a CPU, and on a GPU what `hbm_utilization` leaves."""
    hbm_utilization: float | None = None
    """The share of a GPU's memory that weights, forwards and pages take together. None: 0.9, without `kv_cache_mb`."""
    enable_prefix_caching: bool = True
    """Requests with equal beginnings share pages."""
    prefix_cache_capacity: float = 0.3
    """The largest share of the pages that is kept for later requests."""

    def __post_init__(self) -> None:
        _at_least("page_size", self.page_size, 1)
        megabytes, share = self.kv_cache_mb, self.hbm_utilization
        if megabytes is not None and (not _is_number(megabytes) or megabytes <= 0):
            raise ConfigurationError(f"kv_cache_mb: found {described(megabytes)}, expected a number above 0")
        if share is not None and (not _is_number(share) or not 0 < share <= 1):
            raise ConfigurationError(
                f"hbm_utilization: found {described(share)}, expected a number above 0 and at most 1"
            )
        if megabytes is not None and share is not None:
            raise ConfigurationError("Found kv_cache_mb and hbm_utilization, expected one of both")
        _check_bool("enable_prefix_caching", self.enable_prefix_caching)
        if not _is_number(self.prefix_cache_capacity) or not 0 <= self.prefix_cache_capacity <= 1:
            found = described(self.prefix_cache_capacity)
            raise ConfigurationError(f"prefix_cache_capacity: found {found}, expected a number from 0 to 1")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Seats and tokens of a step."""

    max_num_seqs: int = 32
    """Most requests that run at a time."""
    max_num_batched_tokens: int = 512
    """Most tokens of one step. A longer prompt is computed in chunks, beside the other requests."""
    max_long_prefill_tokens: int = 64
    """Most tokens of a step, while others decode, of a prompt that has more than four times as many."""
    ageing_steps: int = 256
    """A waiting request rises by one priority each time so many steps have passed. So none starves."""
    num_speculative_tokens: int = 3
    """Most tokens that are guessed from the text so far, for each of at most two running greedy requests; 0 is off."""

    def __post_init__(self) -> None:
        _at_least("max_num_seqs", self.max_num_seqs, 1)
        _at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1)
        _at_least("max_long_prefill_tokens", self.max_long_prefill_tokens, 1)
        _at_least("ageing_steps", self.ageing_steps, 1)
        _at_least("num_speculative_tokens", self.num_speculative_tokens, 0)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens: found {self.max_num_batched_tokens}, expected at least max_num_seqs, "
                f"{self.max_num_seqs}: each running request needs a token of the step"
            )


_STEP_ON_GPU: Final = {"max_num_batched_tokens": 2_048, "max_long_prefill_tokens": 2_048}
"""A step with a part of a prompt launches each kernel by itself. On an H200 that takes the host 20 ms, for 16 tokens as
for 528: in small parts, a prompt would hold up the others more often, and not for a shorter time."""


@dataclass(frozen=True, slots=True)
class Config:
    """All of an engine."""

    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    max_model_len: int | None = None
    """Most tokens of a prompt and its output. None: as many as the model knows positions."""
    precision: Precision = "fp32"
    device: str = "cpu"
    """cpu, cuda or cuda:N."""
    attention: AttentionChoice = "auto"
    """Of decoding rows: sdpa over gathered pages, or the kernel in triton; auto: the kernel where it can run."""
    cuda_graphs: bool = True
    """On a GPU with the kernel, one launch for all kernels of a step in which every row decodes."""
    compile_decoding: bool = False
    """The model in these graphs is compiled: faster steps, and a load that takes longer."""
    async_scheduling: Literal["auto", "on", "off"] = "auto"
    """Launch a step of decoding rows before the tokens of the last one are read; auto: on a GPU."""
    joined_linears: Literal["auto", "on", "off"] = "auto"
    """Layers of one input (queries, keys and values; gate and up) are one product; auto: on a GPU."""
    packed_linears: Literal["auto", "on", "off"] = "auto"
    """Weights in oneDNN's layout: auto measures at load and keeps what is faster."""
    cache_dir: str | Path | None = None
    """Folder of what a load has measured and proven: later loads of the same do not repeat it. None: none is kept."""

    def __post_init__(self) -> None:
        if self.max_model_len is not None:
            _at_least("max_model_len", self.max_model_len, 2)
        if self.cache_dir is not None and not isinstance(self.cache_dir, str | Path):
            raise ConfigurationError(f"cache_dir: found {described(self.cache_dir)}, expected the path of a folder")
        if not isinstance(self.device, str) or not _DEVICE.fullmatch(self.device):
            raise ConfigurationError(f"device: found {described(self.device)}, expected cpu, cuda or cuda:N")
        if self.device == "cpu" and self.cache.hbm_utilization is not None:
            found = described(self.cache.hbm_utilization)
            raise ConfigurationError(f"hbm_utilization: found {found} on a CPU, expected kv_cache_mb in its place")
        _check_bool("cuda_graphs", self.cuda_graphs)
        _check_bool("compile_decoding", self.compile_decoding)
        for name, value, expected in (
            ("precision", self.precision, _PRECISIONS),
            ("joined_linears", self.joined_linears, _SWITCH),
            ("packed_linears", self.packed_linears, _SWITCH),
            ("async_scheduling", self.async_scheduling, _SWITCH),
            ("attention", self.attention, _ATTENTION),
        ):
            if value not in expected:
                raise ConfigurationError(f"{name}: found {described(value)}, expected one of: {', '.join(expected)}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> Config:
        """Of one flat set of keywords, and `profile`. Raises ConfigurationError for a name that is no field.

        The tokens of a step may be None, or left out: then the device decides.
        """
        options = _with_profile(options)
        options = {name: value for name, value in options.items() if value is not None or name not in _STEP_ON_GPU}
        if str(options.get("device")).startswith("cuda"):
            options = {**_STEP_ON_GPU, **options}
        parts: dict[type, dict[str, Any]] = {CacheConfig: {}, SchedulerConfig: {}, cls: {}}
        owner = {each.name: part for part in parts for each in fields(part) if each.name not in ("cache", "scheduler")}
        for name, value in options.items():
            if name not in owner:
                near = difflib.get_close_matches(str(name), owner, 1)
                hint = f", did you mean {near[0]}" if near else ""
                raise ConfigurationError(
                    f"Unknown option {shown(name)}{hint}. Expected: {', '.join([*owner, 'profile'])}"
                )
            parts[owner[name]][name] = value
        return cls(
            cache=CacheConfig(**parts[CacheConfig]), scheduler=SchedulerConfig(**parts[SchedulerConfig]), **parts[cls]
        )


def _with_profile(options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a profile behind those that were given. A size of the pages that is None was not given."""
    own = {name: value for name, value in options.items() if name != "profile"}
    profile = options.get("profile")
    if profile is None:
        return own
    if profile not in PROFILES:
        raise ConfigurationError(f"profile: found {described(profile)}, expected one of: {', '.join(PROFILES)}")
    kind = "cuda" if str(own.get("device")).startswith("cuda") else "cpu"
    values = {**PROFILES[profile], **PROFILE_SIZES.get(profile, {}).get(kind, {})}
    if any(own.get(name) is not None for name in _SIZES):
        values = {name: value for name, value in values.items() if name not in _SIZES}
    given = {name: value for name, value in own.items() if value is not None or name not in _SIZES}
    return {**values, **given}


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigurationError(f"{name}: found {described(value)}, expected true or false")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at_least(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigurationError(f"{name}: found {described(value)}, expected an integer of at least {least}")
