"""Regular expressions of settings, as RE2 understands them: the time of a search is linear in the text.

Python's own `re` needs seconds for 25 characters and an unfortunate pattern. RE2 has no look-around and no
back-references; those patterns are refused with their reason.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, Protocol, cast

from penstock.registry.errors import ConfigurationError

__all__ = ["Match", "Pattern", "compile_pattern"]

_MISSING: Final = (
    "google-re2 is not installed, and patterns need it. Expected: pip install '.[cli]' in the checkout of Penstock"
)
_REASONS: Final = (
    (re.compile(r"operator: \(\?<?[=!]"), "RE2 has no look-ahead and no look-behind"),
    (re.compile(r"escape sequence: \\[1-9]"), "RE2 has no back-references"),
    (re.compile(r"operator: \(\?P?[=(]"), "RE2 has no back-references and no conditions"),
    (re.compile(r"bad repetition operator"), "RE2 has no possessive quantifiers, and a repetition is not repeated"),
    (re.compile(r"operator: \(\?>"), "RE2 has no atomic groups"),
)


class Match(Protocol):
    """One match of a pattern, in bytes."""

    def start(self) -> int:
        """The offset of its first byte."""

    def end(self) -> int:
        """The offset behind its last byte."""


class Pattern(Protocol):
    """A compiled pattern. It is searched in UTF-8; bytes that are no UTF-8 match nothing."""

    def finditer(self, text: bytes) -> Iterator[Match]:
        """The matches that do not overlap, from left to right."""


def compile_pattern(pattern: str) -> Pattern:
    """The compiled pattern.

    Raises ConfigurationError, with the pattern and the reason, if RE2 cannot compile it, if it matches the empty text,
    and if google-re2 is not installed.
    """
    try:
        # Here: a program that only submits jobs needs neither the package nor the time of its import.
        import re2
    except ImportError:
        raise ConfigurationError(_MISSING) from None
    options = re2.Options()
    options.log_errors = False
    try:
        # As bytes, but UTF-8: the offsets of matches are then offsets of bytes, and no text has to be valid.
        compiled = re2.compile(pattern.encode(), options)
    except (re2.error, UnicodeEncodeError) as problem:
        raise ConfigurationError(f"{pattern!r:.200} cannot be compiled: {_reason(problem, pattern)}") from None
    if compiled.fullmatch(b"") is not None:
        raise ConfigurationError(f"{pattern!r:.200} matches the empty text, which is everywhere")
    return cast(Pattern, compiled)


def _reason(problem: Exception, pattern: str) -> str:
    if isinstance(problem, UnicodeEncodeError):
        return "it has a character that no text can have"
    told = problem.args[0]
    text = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
    if text.endswith("(?P") and "(?P=" in pattern:
        return "RE2 has no back-references"
    # RE2 quotes the pattern as it is, which may have lines: a refusal is one line.
    return next((reason for found, reason in _REASONS if found.search(text)), repr(text)[1:-1])
