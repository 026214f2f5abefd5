"""Docstrings -> a byte-level BPE and a small Llama, trained from nothing in plain torch.

    texts -> shuffled -> tokenizer of the training part -> one stream of tokens, an end behind each text
                      -> held-out part -----------------> loss before and after
    stream -> rows at random places -> AdamW: linear warm-up, cosine down to a tenth -> folder of transformers

Importing this module imports torch and transformers.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

from penstock.compose.generate_demo.recipe import Recipe, Result

__all__ = ["learning_rate", "train"]

_END: Final = "</s>"
_WARM_UP: Final = 0.05
"""Of all steps."""
_LAST: Final = 0.1
"""The learning rate of the last step, as a share of the peak."""
_LONGEST_GRADIENT: Final = 1.0


def train(
    recipe: Recipe, texts: Sequence[str], folder: Path, threads: int, on_step: Callable[[int, float], None]
) -> Result:
    """Trains, and writes model and tokenizer into the folder. The same recipe sees the same rows.

    threads: of torch, for the time of the training. on_step: called with the steps so far and the loss of the last.
    """
    before, began = torch.get_num_threads(), time.perf_counter()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(recipe.seed)
        kept, held_out = _parts(recipe, texts)
        tokenizer = _tokenizer(recipe, kept)
        model = LlamaForCausalLM(_config(recipe, tokenizer))
        unseen = _stream(tokenizer, held_out)
        loss_before = _loss(model, unseen, recipe)
        _run(model, _stream(tokenizer, kept), recipe, on_step)
        loss = _loss(model, unseen, recipe)
    finally:
        torch.set_num_threads(before)
    _save(model, tokenizer, folder)
    return Result(
        parameters=sum(each.numel() for each in model.parameters()),
        docstrings=len(texts),
        characters=sum(map(len, texts)),
        tokens_seen=recipe.steps * recipe.rows * recipe.positions,
        held_out=len(held_out),
        loss_before=round(loss_before, 3),
        loss=round(loss, 3),
        seconds=round(time.perf_counter() - began, 1),
        threads=threads,
    )


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    # The demo has a progress bar of its own.
    had_bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    finally:
        if had_bars:
            logging.enable_progress_bar()


def learning_rate(step: int, recipe: Recipe) -> float:
    """Of a step, the first of which is 0: up to the peak in a straight line, then down along a cosine.

    >>> recipe = Recipe(steps=100, learning_rate=1.0)
    >>> [round(learning_rate(step, recipe), 2) for step in (0, 4, 5, 52, 99)]
    [0.2, 1.0, 1.0, 0.56, 0.1]
    """
    warm = max(1, round(recipe.steps * _WARM_UP))
    if step < warm:
        return recipe.learning_rate * (step + 1) / warm
    gone = (step - warm) / max(1, recipe.steps - 1 - warm)
    return recipe.learning_rate * (_LAST + (1 - _LAST) * (1 + math.cos(math.pi * gone)) / 2)


def _parts(recipe: Recipe, texts: Sequence[str]) -> tuple[list[str], list[str]]:
    """(kept for training, held out)"""
    shuffled = random.Random(recipe.seed).sample(list(texts), len(texts))  # noqa: S311 - no secret
    number = max(1, round(len(texts) * recipe.held_out))
    return shuffled[number:], shuffled[:number]


def _tokenizer(recipe: Recipe, texts: Sequence[str]) -> Any:
    """Byte-level: every text has tokens."""
    bare = Tokenizer(models.BPE())
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bare.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bare, eos_token=_END, clean_up_tokenization_spaces=False)


def _config(recipe: Recipe, tokenizer: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=recipe.hidden,
        intermediate_size=recipe.feed_forward,
        num_hidden_layers=recipe.layers,
        num_attention_heads=recipe.heads,
        num_key_value_heads=recipe.kv_heads,
        max_position_embeddings=recipe.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=None,
    )


def _stream(tokenizer: Any, texts: Sequence[str]) -> torch.Tensor:
    """(T,) the tokens of all texts, with an end before the first and behind each."""
    end = tokenizer.eos_token_id
    tokens = [end]
    for ids in tokenizer(list(texts))["input_ids"]:
        tokens += [*ids, end]
    return torch.tensor(tokens)


def _run(model: Any, stream: torch.Tensor, recipe: Recipe, on_step: Callable[[int, float], None]) -> None:
    matrices = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
    places = torch.Generator().manual_seed(recipe.seed)
    model.train()
    for step in range(recipe.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe)
        starts = torch.randint(0, len(stream) - recipe.positions, (recipe.rows,), generator=places)
        loss = _row_loss(model, torch.stack([stream[at : at + recipe.positions + 1] for at in starts.tolist()]))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), _LONGEST_GRADIENT)
        optimizer.step()
        on_step(step + 1, loss.item())
    model.eval()


def _row_loss(model: Any, rows: torch.Tensor) -> torch.Tensor:
    """rows: (B, T + 1). The mean loss of a token."""
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def _loss(model: Any, stream: torch.Tensor, recipe: Recipe) -> float:
    """Over the whole stream, row by row, without overlap."""
    size = recipe.positions
    total, counted = 0.0, 0
    model.eval()
    with torch.inference_mode():
        for start in range(0, len(stream) - 1, size):
            row = stream[start : start + size + 1]
            total += _row_loss(model, row[None]).item() * (len(row) - 1)
            counted += len(row) - 1
    return total / counted
