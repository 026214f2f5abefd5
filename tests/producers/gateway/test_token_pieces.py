"""The bytes of tokens, and their places in a text, for the kinds of tokenizers that decoders have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from penstock.producers.gateway.token_pieces import TokenChoice, TokenPieces, TokenPlaces, shown_bytes

TEXT = "Grüße, 日本 a"


def of_bytes() -> Any:
    """As GPT-2: each byte is a token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def of_pieces() -> Any:
    """As Llama 2: letters with a mark for the space, and bytes for those that it does not know."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁Grüße,a"]
    tokenizer = Tokenizer(
        models.BPE({name: number for number, name in enumerate(names)}, [], byte_fallback=True, unk_token=names[0])
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def choices(tokens: Sequence[int]) -> list[TokenChoice]:
    """Tokens as a worker tells them."""
    return [TokenChoice(token, {token: -1.0}) for token in tokens]


@pytest.mark.parametrize("make", [of_bytes, of_pieces])
def test_bytes_join_to_the_text(make: Any):
    """Also those of tokens that are a part of a character only."""
    tokenizer = make()
    pieces = TokenPieces(tokenizer)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).ids
    told = b"".join(map(pieces.of, tokens))
    assert told.decode().removeprefix(" ") == TEXT
    assert any(shown_bytes(pieces.of(token)).startswith("bytes:\\x") for token in tokens)
    end = tokenizer.token_to_id("</s>")
    assert (pieces.of(end), pieces.in_text(end), pieces.of(100_000)) == (b"</s>", b"", b"")


@pytest.mark.parametrize("make", [of_bytes, of_pieces])
@pytest.mark.parametrize("step", [1, 3, 100])
def test_tokens_stand_in_the_text(make: Any, step: int):
    """However the text comes; the end of the model, behind the text, is left out."""
    tokenizer = make()
    pieces = TokenPieces(tokenizer)
    tokens = tokenizer.encode(TEXT, add_special_tokens=False).ids
    given = choices([*tokens, tokenizer.token_to_id("</s>")])
    places = TokenPlaces(pieces)
    found = []
    for start in range(0, max(len(given), len(TEXT)), step):
        found += places.take(TEXT[start : start + step], given[start : start + step])
    assert [placed.choice.id for placed in found] == tokens
    for placed in found:
        shown = shown_bytes(pieces.of(placed.choice.id)).strip()
        assert shown.startswith("bytes:") or TEXT[placed.start :].lstrip().startswith(shown)


def test_a_cut_character_is_a_place_of_its_own():
    """Its bytes come to nothing: the text has a mark for them, and the next token begins behind it."""
    tokenizer = of_bytes()
    first, *_ = tokenizer.encode("日", add_special_tokens=False).ids
    (letter,) = tokenizer.encode("a", add_special_tokens=False).ids
    found = TokenPlaces(TokenPieces(tokenizer)).take("\ufffda\ufffd", choices([first, letter, first]))
    assert [placed.start for placed in found] == [0, 1, 2]
