"""A folder in the format of transformers -> a decoder whose attention reads pages, proven by a probe.

    folder -> config: kinds of layers, positions -> model, its tokenizer -> attention switched over -> probe

The model's code is that of transformers, unmodified. The engine owns its model: the name of the attention function
stands in the model's configuration, which all its modules share.

Importing this module imports torch and transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from penstock.registry.errors import ConfigurationError, shown
from penstock.workers.generation import attention
from penstock.workers.generation.attention import DecodeKernel, KeyValuePools, StepContext, in_step
from penstock.workers.generation.batch import MOST_GROUPS, FlatBatch, flat_batch
from penstock.workers.generation.config import Precision
from penstock.workers.generation.flat_positions import FlatPositions
from penstock.workers.generation.layer_rules import LayerRule, layer_rules
from penstock.workers.generation.scheduler import Chunk
from penstock.workers.runtime.torch_device import TorchDevice

__all__ = ["Decoder", "check_positions", "load_decoder", "wrap_decoder"]

_DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16}
_TOKENIZER_FILES: Final = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


@dataclass(slots=True)
class Decoder:
    """A model in evaluation mode, and what the engine must know about it."""

    model: Any
    tokenizer: Any
    """None where the folder has none: prompts are token ids then, and answers have no text."""
    rules: list[LayerRule]
    max_positions: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    asks_cache_for_positions: bool
    device: TorchDevice
    kernel: DecodeKernel | None = None
    """Of decoding rows; None: their pages are gathered."""
    folder: Path | None = None
    """Where it was loaded from; None: the caller had the model."""

    @property
    def name(self) -> str:
        """The architecture, for messages."""
        return type(self.model).__name__

    def batch(self, chunks: Sequence[Chunk], page_size: int) -> FlatBatch:
        """The tensors of a step's plan, on the model's device."""
        # The kernel reads as many keys of each row as it has: nothing is filled up, and one call does for all rows.
        groups = MOST_GROUPS if self.kernel is None else 1
        return flat_batch(chunks, page_size, dict.fromkeys(self.rules), self.device, groups)

    def forward(self, batch: FlatBatch, pools: KeyValuePools, model: Any = None) -> tuple[torch.Tensor, list[int]]:
        """Returns (logits (S, V) in fp32, layers that called the attention). model: another form of the model."""
        context = StepContext(pools, self.rules, batch.slots, batch.groups, self.kernel)
        cache = FlatPositions(batch.position_ids) if self.asks_cache_for_positions else None
        with torch.inference_mode(), in_step(context):
            output = (self.model if model is None else model)(
                input_ids=batch.input_ids,
                position_ids=batch.position_ids,
                past_key_values=cache,
                use_cache=False,
                logits_to_keep=batch.logits_to_keep,
            )
        return output.logits[0].float(), context.calls


def load_decoder(
    folder: str | Path, precision: Precision, max_model_len: int | None, device: TorchDevice | None = None
) -> Decoder:
    """Loads from files only. Raises ConfigurationError for a folder or an architecture that is not served.

    device: None is the CPU.
    """
    path = Path(folder)
    if not (path / "config.json").is_file():
        raise ConfigurationError(f"Found no config.json in {shown(path.name)}, expected a folder of transformers")
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        check_positions(config.get_text_config(), max_model_len)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=_DTYPES[precision], local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(f"{shown(path.name)} is no model that can be loaded: {shown(error)}") from error
    tokenizer = None
    if any((path / name).is_file() for name in _TOKENIZER_FILES):
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    decoder = wrap_decoder(model, tokenizer, max_model_len, device)
    decoder.folder = path.resolve()
    return decoder


def wrap_decoder(model: Any, tokenizer: Any, max_model_len: int | None, device: TorchDevice | None = None) -> Decoder:
    """A loaded model. It is the engine's from here on: it moves to the device, and its attention is switched over.

    device: None is the CPU. Raises ConfigurationError for kinds of layers or positions that are not served.
    """
    config = model.config.get_text_config()
    longest = check_positions(config, max_model_len)
    rules = layer_rules(config)
    attention.register()
    device = TorchDevice("cpu") if device is None else device
    model = device.place(model, type(model).__name__)
    with suppress(ValueError):
        # It refuses models that choose their attention by class; the probe then finds that no layer calls ours.
        model.set_attn_implementation(attention.NAME)
    asks = bool(getattr(config, "attn_temperature_tuning", False))
    return Decoder(model, tokenizer, rules, longest, int(config.vocab_size), _eos_token_ids(model), asks, device)


def check_positions(config: Any, max_model_len: int | None) -> int:
    """Most positions that are served. Raises ConfigurationError where they depend on the other rows of a batch.

    Scaling of kind `dynamic` and `longrope` reads the longest position of the whole flat batch.
    """
    longest = int(getattr(config, "max_position_embeddings", None) or 2**31)
    for kind, original in _rope_kinds(config):
        if kind == "dynamic":
            raise ConfigurationError("Found rotary positions of kind dynamic, expected a kind without the batch in it")
        if kind == "longrope":
            longest = min(longest, int(original or longest))
    if max_model_len is not None and max_model_len > longest:
        raise ConfigurationError(f"max_model_len: found {max_model_len}, expected at most {longest} for this model")
    return longest if max_model_len is None else max_model_len


def _rope_kinds(config: Any) -> list[tuple[str, Any]]:
    """(kind, positions before scaling) of each set of rotary parameters: one, or one for each type of layer."""
    parameters = getattr(config, "rope_parameters", None) or {}
    sets = [each for each in parameters.values() if isinstance(each, dict)] or [parameters]
    fallback = getattr(config, "original_max_position_embeddings", None)
    return [
        (str(each.get("rope_type", "default")), each.get("original_max_position_embeddings", fallback)) for each in sets
    ]


def _eos_token_ids(model: Any) -> frozenset[int]:
    found = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if found is None:
        found = getattr(model.config.get_text_config(), "eos_token_id", None)
    if found is None:
        return frozenset()
    return frozenset(found if isinstance(found, list | tuple) else [found])
