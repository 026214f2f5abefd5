"""Sampling parameters and a decoder -> which tokens may come, checked against its vocabulary.

Importing this module imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from penstock.registry.errors import InvalidInput
from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.model import Decoder
from penstock.workers.generation.request import TokenRules

__all__ = ["token_rules"]


def token_rules(params: SamplingParams, decoder: Decoder) -> TokenRules:
    """Raises InvalidInput for tokens that the model does not have, and for text without a tokenizer."""
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        _check_known(name, getattr(params, name) or (), decoder.vocab_size)
    for name in ("bad_words", "json_schema", "regex", "choice", "grammar"):
        if getattr(params, name) and decoder.tokenizer is None:
            raise InvalidInput(f"{name}: found it for a model without a tokenizer, expected a model with one")
    ending = frozenset((*params.stop_token_ids, *(() if params.ignore_eos else decoder.eos_token_ids)))
    forbidden = None
    if params.allowed_token_ids is not None:
        forbidden = torch.ones(decoder.vocab_size, dtype=torch.bool)
        forbidden[list(params.allowed_token_ids)] = False
        if params.min_tokens and not set(params.allowed_token_ids) - ending:
            raise InvalidInput(
                "allowed_token_ids: found nothing but ends of texts, expected other tokens for min_tokens"
            )
    return TokenRules(ending, _bad_words(params.bad_words, decoder), forbidden)


def _check_known(name: str, tokens: Iterable[int], vocab_size: int) -> None:
    if wrong := [token for token in tokens if token >= vocab_size]:
        raise InvalidInput(f"{name}: found {wrong[0]}, expected numbers below {vocab_size}")


def _bad_words(words: Sequence[str], decoder: Decoder) -> list[list[int]]:
    """The tokens of each word at the beginning of a text and behind a space."""
    found = []
    for word in words:
        for text in (word, f" {word.lstrip()}"):
            tokens = list(decoder.tokenizer(text, add_special_tokens=False)["input_ids"])
            # A tokenizer may know tokens that its model has no logits for.
            if tokens and tokens not in found and max(tokens) < decoder.vocab_size:
                found.append(tokens)
    return found
