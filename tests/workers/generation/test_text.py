"""Text as it grows: no half characters, nothing of a stop string, and in sum what is decoded at once."""

from __future__ import annotations

import random

import pytest

from penstock.workers.generation.text import TextStream, decode
from tests.workers.generation.engines import byte_tokenizer, fallback_tokenizer

TOKENIZER = byte_tokenizer()
FALLBACK = fallback_tokenizer()
TEXTS = ["plain words, and more", "größe naïve café", "日本語のテキスト", "🙂🙃 and 👩‍👩‍👧", "x\ufffdy", "e\u0301"]


def deltas(tokens: list[int], stops: tuple[str, ...] = ()) -> tuple[list[str], TextStream]:
    """What a stream hands out, token by token."""
    stream = TextStream(TOKENIZER, stops)
    found = []
    for token in tokens:
        stream.push([token])
        found.append(stream.take(is_last=False))
    stream.finish()
    found.append(stream.take(is_last=True))
    return found, stream


def encoded(text: str) -> list[int]:
    """Its tokens."""
    return list(TOKENIZER(text)["input_ids"])


@pytest.mark.parametrize("text", TEXTS)
def test_deltas_are_the_text_in_whole_characters(text):
    """ES-007: in sum the text, and no delta has the sign for a part of a character."""
    found, _ = deltas(encoded(text))
    assert "".join(found) == text
    assert all("\ufffd" not in delta for delta in found) or "\ufffd" in text


def test_parts_of_a_character_are_held_back():
    """The tokens of the tests do cut characters: three of the four bytes of this one give no text."""
    tokens = encoded("𐍈")
    assert len(tokens) == 4
    assert deltas(tokens)[0] == ["", "", "", "𐍈", ""]


def test_random_tokens_give_what_is_decoded_at_once():
    """Also where the bytes are no UTF-8 at all."""
    chosen = random.Random(0)
    for _ in range(200):
        tokens = [chosen.randrange(1, len(TOKENIZER)) for _ in range(chosen.randrange(1, 40))]
        found, stream = deltas(tokens)
        assert "".join(found) == stream.text == decode(TOKENIZER, tokens)


def test_bytes_of_a_fallback_give_whole_characters():
    """One byte that begins a character turns each byte beside it into a sign for a part of one, as many as there are.

    For random texts, stops and pieces, a stream gives what is decoded at once and cut.
    """
    chosen = random.Random(2)
    stops = [(), ("🙂",), ("日本", "a")]
    for number in range(600):
        text = (
            "日本🙂🙃é" if number == 0 else "".join(chosen.choice("aé 日本🙂ß") for _ in range(chosen.randrange(1, 15)))
        )
        tokens = [token for each in text for token in ({"a": [258], " ": [257]}.get(each) or each.encode())]
        stream = TextStream(FALLBACK, ends := chosen.choice(stops) if number else ())
        found, start = "", 0
        while start < len(tokens):
            size = chosen.randrange(1, 6) if number else 1
            stream.push(tokens[start : start + size])
            found += stream.take(is_last=False)
            start += size
        stream.finish()
        found += stream.take(is_last=True)
        places = [place for stop in ends if (place := text.find(stop)) >= 0]
        assert found == stream.text == text[: min(places, default=len(text))]


def test_an_incomplete_end_is_shown_at_the_end():
    """A text that stops within a character has the sign for it, as when it is decoded at once."""
    tokens = encoded("ab🙂")[:-1]
    found, _ = deltas(tokens)
    assert "".join(found[:-1]) == "ab"
    assert "".join(found) == decode(TOKENIZER, tokens)


@pytest.mark.parametrize("stop", ["END", "\n\n", "🙂", "é"])
def test_text_is_cut_before_a_stop_string(stop):
    """ES-034: neither the stop string nor a part of it is in any delta, however the tokens cut it."""
    text = f"begin E EN \n naïve{stop} behind{stop}"
    found, stream = deltas(encoded(text), (stop, "never"))
    assert "".join(found) == stream.text == "begin E EN \n naïve"
    assert stream.stopped_by == stop


def test_the_first_of_several_stop_strings_counts():
    """The place in the text decides, not the order of the list."""
    _, stream = deltas(encoded("one two three"), ("three", "two"))
    assert stream.text == "one "
    assert stream.stopped_by == "two"


def test_random_stops_cut_as_a_search_does():
    """For random texts and stops, the stream ends where `str.find` finds the first stop."""
    chosen = random.Random(1)
    for _ in range(300):
        text = "".join(chosen.choice("abé🙂") for _ in range(chosen.randrange(1, 30)))
        stops = tuple("".join(chosen.choice("abé🙂") for _ in range(chosen.randrange(1, 5))) for _ in range(2))
        found, _ = deltas(encoded(text), stops)
        places = [place for stop in stops if (place := text.find(stop)) >= 0]
        ended = [text[:place] for place in places]
        assert "".join(found) in (ended if ended else [text])


def test_stops_count_only_behind_the_tokens_that_may_not_stop():
    """As vLLM does: a stop string that ends in the first tokens is text; one that only begins there cuts."""
    chosen, spanning, ignored = random.Random(2), 0, 0
    for _ in range(400):
        tokens = encoded("".join(chosen.choice("abé🙂") for _ in range(chosen.randrange(1, 30))))
        text, least = decode(TOKENIZER, tokens), chosen.randrange(0, 12)
        free = len(decode(TOKENIZER, tokens[:least]).rstrip("\ufffd"))
        stop = "".join(chosen.choice("abé🙂") for _ in range(chosen.randrange(1, 4)))
        stream, found = TextStream(TOKENIZER, (stop,)), []
        for number, token in enumerate(tokens, 1):
            stream.push([token], may_stop=number > least)
            found.append(stream.take(is_last=False))
        stream.finish()
        found.append(stream.take(is_last=True))
        places = [at for at in range(len(text)) if text.startswith(stop, at) and at + len(stop) > free]
        expected = text[: places[0]] if places and least < len(tokens) else text
        assert "".join(found) == stream.text == expected
        spanning += bool(places) and places[0] < free
        ignored += stop in expected
    assert spanning > 5
    assert ignored > 20


def test_a_possible_stop_is_handed_out_once_it_is_none():
    """What was held back is not lost."""
    found, stream = deltas(encoded("an EN and an E"), ("END",))
    assert "".join(found) == stream.text == "an EN and an E"
    assert not any(delta.endswith(("E", "EN")) for delta in found[:-1])


def test_few_tokens_are_decoded_again():
    """The cost of a token does not grow with the text."""

    class Counting:
        """Counts the tokens that are decoded."""

        def __init__(self) -> None:
            self.tokens = 0

        def decode(self, tokens, **options):
            self.tokens += len(tokens)
            return TOKENIZER.decode(tokens, **options)

    counting = Counting()
    stream = TextStream(counting, ())
    tokens = encoded("words and more words " * 40)
    for token in tokens:
        stream.push([token])
    assert counting.tokens < 8 * len(tokens)
