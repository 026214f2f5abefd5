"""Which keys a query of a layer may see: a model's configuration -> one rule for each layer.

full       all keys up to the query's own
window w   the w last of them, the query's own included
chunk c    those of the query's own chunk of c positions

Where a configuration lists `layer_types`, the list decides. Elsewhere a window or a chunk size holds for all layers.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from penstock.registry.errors import ConfigurationError, shown

__all__ = ["LayerRule", "layer_rules"]

_TYPES: Final = ("chunked_attention", "full_attention", "sliding_attention")


class LayerRule(NamedTuple):
    """At most one of both is set."""

    window: int | None = None
    chunk: int | None = None

    @property
    def reach(self) -> int | None:
        """Most keys that a query sees; None: no bound."""
        return self.window or self.chunk

    def first_visible(self, position: int) -> int:
        """The position of the first key that a query at this position sees."""
        if self.window is not None:
            return max(0, position - self.window + 1)
        return position - position % self.chunk if self.chunk is not None else 0


def layer_rules(config: Any) -> list[LayerRule]:
    """config: of the text model. Raises ConfigurationError for a kind of layer that is not served."""
    number = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if types := getattr(config, "layer_types", None):
        return [_rule(str(each), window, chunk) for each in types[:number]]
    if window is not None:
        return [LayerRule(window=int(window))] * number
    return [LayerRule(chunk=None if chunk is None else int(chunk))] * number


def _rule(kind: str, window: Any, chunk: Any) -> LayerRule:
    if kind == "full_attention":
        return LayerRule()
    if kind == "sliding_attention" and window:
        return LayerRule(window=int(window))
    if kind == "chunked_attention" and chunk:
        return LayerRule(chunk=int(chunk))
    expected = ", ".join(_TYPES)
    raise ConfigurationError(f"Found a layer of type {shown(kind)}, expected layers of these types: {expected}")
