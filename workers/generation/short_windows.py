"""Long windows and chunks of a model made short for a while, so that a short prompt reaches past them.

    config, modules: sliding_window, attention_chunk_size = 4096 --.
    rules of the decoder                                  = 4096 --+-> 16, inside the `with` block, then 4096 again

The model's own code and the rules are changed alike, and apart from each other: a rule that differs from the model's
window stays as it is, so that the probe sees the difference.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from penstock.workers.generation.layer_rules import LayerRule
from penstock.workers.generation.model import Decoder

__all__ = ["short_windows"]

_FIELDS: Final = ("sliding_window", "attention_chunk_size")
_SHORT: Final = 16


@contextmanager
def short_windows(decoder: Decoder, most: int) -> Iterator[None]:
    """Windows and chunks of more than `most` keys are of 16.

    One that no position of the decoder reaches past hides no key, so it stays.
    """
    config = decoder.model.config.get_text_config()
    long = {name: size for name in _FIELDS if most < (size := getattr(config, name, None) or 0) < decoder.max_positions}
    changed = [(owner, name, size) for name, size in long.items() for owner in _owners(decoder.model, name, size)]
    rules = decoder.rules
    try:
        for owner, name, _ in changed:
            setattr(owner, name, _SHORT)
        decoder.rules = [_shortened(rule, *map(long.get, _FIELDS)) for rule in rules]
        yield
    finally:
        decoder.rules = rules
        for owner, name, size in changed:
            setattr(owner, name, size)


def _owners(model: Any, name: str, size: int) -> list[Any]:
    """The configurations and modules that hold the size under this name, each once."""
    modules = list(model.modules())
    configs = [model.config.get_text_config(), *(getattr(module, "config", None) for module in modules)]
    owners = {id(owner): owner for owner in (*configs, *modules) if getattr(owner, name, None) == size}
    return list(owners.values())


def _shortened(rule: LayerRule, window: int | None, chunk: int | None) -> LayerRule:
    if window is not None and rule.window == window:
        return LayerRule(window=_SHORT)
    if chunk is not None and rule.chunk == chunk:
        return LayerRule(chunk=_SHORT)
    return rule
