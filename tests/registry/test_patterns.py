"""Patterns of settings: what RE2 refuses and why, and that a search cannot take long."""

from __future__ import annotations

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.patterns import compile_pattern


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"(?<=a)b", "no look-ahead and no look-behind"),
        (r"(?<!a)b", "no look-ahead and no look-behind"),
        (r"a(?=b)", "no look-ahead and no look-behind"),
        (r"a(?!b)", "no look-ahead and no look-behind"),
        (r"(a)\1", "no back-references"),
        (r"(?P<n>a)(?P=n)", "no back-references"),
        (r"(a)?(?(1)b|c)", "no back-references and no conditions"),
        (r"(?>a)", "no atomic groups"),
        (r"a*+", "no possessive quantifiers"),
        (r"a{2000}", "invalid repetition size"),
        ("(", "missing )"),
        ("a\ud800", "no text can have"),
        ("two\n(lines", "missing ): two\\n(lines"),
    ],
)
def test_pattern_that_cannot_be_compiled_is_refused(pattern: str, reason: str):
    """CF-023: the error has the pattern and the reason, on one line, and RE2 writes nothing by itself."""
    with pytest.raises(ConfigurationError) as refused:
        compile_pattern(pattern)
    assert str(refused.value).startswith(f"{pattern!r} cannot be compiled: ")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_refusals_are_silent(capfd: pytest.CaptureFixture[str]):
    """RE2's own log line for a pattern that it cannot compile is off."""
    with pytest.raises(ConfigurationError):
        compile_pattern("(")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("pattern", ["", "a*", "(x|)", "^$"])
def test_pattern_of_the_empty_text_is_refused(pattern: str):
    """It would find something everywhere."""
    with pytest.raises(ConfigurationError, match="matches the empty text"):
        compile_pattern(pattern)


def test_offsets_are_of_bytes():
    """Letters outside of ASCII count with their bytes in UTF-8, and bytes that are no UTF-8 match nothing."""
    matches = [(match.start(), match.end()) for match in compile_pattern("é|b+").finditer(b"a\xff\xc3\xa9bb")]
    assert matches == [(2, 4), (4, 6)]


def test_an_unfortunate_pattern_takes_no_time():
    """Python's `re` needs 2**40 steps for this text; the time limit of the test is the judge."""
    assert list(compile_pattern("(a|aa)+$").finditer(b"a" * 40 + b"b")) == []
