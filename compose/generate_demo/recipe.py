"""What the writer of the demo is made of: the sizes of model and training. Pure values, no framework."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Recipe", "Result"]


@dataclass(frozen=True, slots=True)
class Recipe:
    """A Llama-shaped decoder, its tokenizer, and how long it is trained. Another recipe makes another model."""

    vocabulary: int = 3072
    """Tokens of the byte-level BPE, with the end."""
    hidden: int = 192
    feed_forward: int = 512
    layers: int = 4
    heads: int = 6
    kv_heads: int = 2
    positions: int = 256
    """Tokens of a row of training, and of a prompt with its text."""
    rows: int = 8
    """Of a batch of training."""
    steps: int = 600
    learning_rate: float = 3e-3
    """At its peak."""
    held_out: float = 0.04
    """The share of the docstrings that is not trained on."""
    seed: int = 17


@dataclass(frozen=True, slots=True)
class Result:
    """What the training has made. Losses are of the held-out docstrings, in nats per token."""

    parameters: int
    docstrings: int
    characters: int
    tokens_seen: int
    held_out: int
    loss_before: float
    loss: float
    seconds: float
    threads: int
