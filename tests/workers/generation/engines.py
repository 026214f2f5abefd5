"""Engines of the tests: a pool of a given number of pages, prompts, and a folder with a small model and tokenizer."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from penstock.registry.sampling_params import SamplingParams
from penstock.workers.generation.engine import Engine
from penstock.workers.generation.model import wrap_decoder
from penstock.workers.generation.probe import probe
from tests.workers.generation.architectures import VOCAB, decoder

__all__ = [
    "GREEDY",
    "byte_tokenizer",
    "fallback_tokenizer",
    "engine_with_pages",
    "open_engine",
    "prompts_of",
    "token_ids",
    "write_model",
]

GREEDY: Final = SamplingParams(temperature=0, max_tokens=16)
_END: Final = "</s>"
_TEXTS: Final = ["the stream of the river", "größe, naïve café", "日本語のテキスト", "🙂🙃 emoji 🙂"]


def prompts_of(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    chosen = random.Random(seed)
    return [[chosen.randrange(1, VOCAB) for _ in range(length)] for length in lengths]


def token_ids(outputs: list[Any]) -> list[list[int]]:
    """What each request wrote."""
    return [list(output.outputs[0].token_ids) for output in outputs]


def open_engine(model: Any, tokenizer: Any = None, **options: Any) -> Engine:
    """An engine without packed weights: their trial takes time, and its outcome depends on the machine."""
    return Engine.from_model(model, tokenizer, **{"packed_linears": "off", **options})


def engine_with_pages(model: Any, num_pages: int, page_size: int, **options: Any) -> Engine:
    """An engine whose requests share so many pages."""
    page_nbytes = probe(wrap_decoder(model, None, None), page_size).page_nbytes
    # Half a page more, so that no rounding takes one.
    megabytes = (num_pages + 1.5) * page_nbytes / 1e6
    engine = open_engine(model, page_size=page_size, kv_cache_mb=megabytes, **options)
    assert engine.pages.num_usable == num_pages
    return engine


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE: every byte is a token, so that characters of several bytes come in pieces. Ends with </s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXTS, trainer)
    options: dict[str, Any] = {"eos_token": _END, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Two tokens of text and one for each byte, decoded as those of Llama 2, Mistral and Gemma: a run of bytes as a
    whole. A byte is the token of its number."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)} | {_END: 256, "\u2581": 257, "a": 258}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    options: dict[str, Any] = {"eos_token": _END, "clean_up_tokenization_spaces": False}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def write_model(folder: Path, **changes: Any) -> Path:
    """A Llama of random weights, and its tokenizer, in the format of transformers."""
    tokenizer = byte_tokenizer()
    model = decoder(
        "Llama",
        config=LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=None,
            **{"max_position_embeddings": 256, **changes},
        ),
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
