"""Privacy: which texts must not be readable outside of the process, and which tenant owns a key.

    text, nested data --> InputRedactor.redact, redact_all --> the same without what patterns and detectors find
                      --> InputRedactor.changes            --> whether that would be another text

What is kept for a person (logs, the audit log, dead letters on the screen, texts of exceptions) is redacted. What is
kept for a model (reference samples, cached answers) must be whole: it is kept only where redaction changes nothing.

The keys of cached answers are made of the inputs as received: two inputs that differ in a redacted part only are two
questions.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple, Protocol, TypeAlias

import numpy as np

from penstock.registry.errors import ConfigurationError
from penstock.registry.patterns import Match, Pattern, compile_pattern
from penstock.registry.queues import parse_name
from penstock.registry.settings_sections import PrivacyConfig
from penstock.registry.tensors import STRING, Array, Tensor, decode

__all__ = ["DETECTORS", "InputRedactor", "REPLACEMENT", "TenantIsolation", "TextFinder", "redactor_of"]

REPLACEMENT: Final = "[REDACTED]"
_TENANT_VARIABLE: Final = "PENSTOCK_TENANT_ID"
_CARD_DIGITS: Final = range(13, 20)
_DIGITS: Final = re.compile(rb"[0-9]+")
_NO_SSN_AREA: Final = re.compile(rb"000|666|9..")
_TEXT_KINDS: Final = "OSU"
"""The kinds of NumPy dtypes that hold text."""


class _Span(NamedTuple):
    """Offsets in bytes of a text that is removed."""

    start: int
    end: int


_Check: TypeAlias = Callable[[bytes, Match], Iterator[_Span]]


class _Detector(NamedTuple):
    """A pattern, and the check of what it finds."""

    pattern: str
    check: _Check


class TextFinder(Protocol):
    """A finder of personal data that is no pattern. For any thread."""

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """The offsets of the found texts, in characters."""


class InputRedactor:
    """Removes personal data from text. For any thread; the time is linear in the text.

    patterns: regular expressions of RE2. replacement: put in the place of each text that is found; texts that overlap
    become one. detectors: names in DETECTORS. finders: others, whose time is their own; see presidio.py. Raises
    ConfigurationError for a pattern that cannot be compiled, with the reason, and for an unknown detector.
    """

    def __init__(
        self,
        patterns: Iterable[str] = (),
        replacement: str = REPLACEMENT,
        *,
        detectors: Iterable[str] = (),
        finders: Iterable[TextFinder] = (),
    ) -> None:
        self.replacement: Final = replacement
        self._text_finders = list(finders)
        self._finders: list[tuple[Pattern, _Check]] = [(compile_pattern(pattern), _whole) for pattern in patterns]
        for name in detectors:
            detector = DETECTORS.get(name)
            if detector is None:
                raise ConfigurationError(f"Unknown detector {name!r:.60}. Expected one of: {', '.join(DETECTORS)}")
            self._finders.append((compile_pattern(detector.pattern), detector.check))

    @property
    def is_active(self) -> bool:
        """Whether there is a pattern, a detector or a finder. Otherwise nothing is changed."""
        return bool(self._finders or self._text_finders)

    def redact(self, text: str) -> str:
        """The text with the replacement in the place of all that was found; the same object if nothing was."""
        if not self.is_active:
            return text
        raw = text.encode("utf-8", "surrogatepass")
        spans = self._spans(raw)
        if not spans:
            return text
        redacted = self._replaced(raw, spans)
        try:
            return redacted.decode("utf-8", "surrogatepass")
        except UnicodeDecodeError:  # `\C` in a pattern matches a part of a character
            return redacted.decode("utf-8", "replace")

    def redact_all(self, value: Any) -> Any:
        """Nested data with every text redacted: str, bytes, mappings with their keys, sequences, sets, arrays of text.

        Returns new containers of the same kind; bytearray and memoryview become bytes. Numbers and other objects are
        returned as they are. Keys that are equal once they are redacted get a number.
        """
        if not self.is_active:
            return value
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, bytes | bytearray | memoryview):
            raw = bytes(value)
            return self._replaced(raw, spans) if (spans := self._spans(raw)) else raw
        if isinstance(value, np.ndarray):
            return self._redacted_array(value)
        if isinstance(value, Mapping):
            return self._redacted_mapping(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*map(self.redact_all, value))
        for kind in (list, tuple, frozenset, set):
            if isinstance(value, kind):
                return kind(map(self.redact_all, value))
        return value

    def changes(self, value: object) -> bool:
        """Whether `redact_all` would change a text in this value."""
        return self.is_active and any(self._spans(raw) for raw in _texts(value))

    def may_leave_memory(self, content: Sequence[Tensor], body: bytes | memoryview) -> bool:
        """Whether encoded inputs or outputs hold no text that would be redacted: else they are not cached beyond L1.

        content, body: see registry.tensors.encode. Asked for the outputs, which are stored, and for the inputs, whose
        digest is: a digest of few digits can be guessed. Raises UndecodableEnvelope.
        """
        if not self.is_active or all(tensor.dtype != STRING for tensor in content):
            return True
        return not self.changes(list(decode(content, body).values()))

    def _spans(self, raw: bytes) -> list[_Span]:
        """The found spans in order; those that overlap are one."""
        of_patterns = (
            span
            for pattern, check in self._finders
            for match in pattern.finditer(raw)
            for span in check(raw, match)
            if span.start < span.end
        )
        found = sorted(chain(of_patterns, self._spans_of_finders(raw)))
        joined: list[_Span] = []
        for span in found:
            if joined and span.start < joined[-1].end:
                joined[-1] = _Span(joined[-1].start, max(span.end, joined[-1].end))
            else:
                joined.append(span)
        return joined

    def _spans_of_finders(self, raw: bytes) -> Iterator[_Span]:
        if not self._text_finders:
            return
        # Bytes that are no UTF-8 become one character each, so that offsets can be counted back.
        text = raw.decode("utf-8", "surrogateescape")
        in_characters = [span for finder in self._text_finders for span in finder.spans(text)]
        if in_characters:
            ends = [0, *accumulate(len(letter.encode("utf-8", "surrogateescape")) for letter in text)]
            yield from (_Span(ends[start], ends[end]) for start, end in in_characters)

    def _replaced(self, raw: bytes, spans: Sequence[_Span]) -> bytes:
        starts = (0, *(span.end for span in spans))
        ends = (*(span.start for span in spans), len(raw))
        return self.replacement.encode().join(raw[start:end] for start, end in zip(starts, ends, strict=True))

    def _redacted_array(self, values: Array) -> Array:
        if values.dtype.kind not in _TEXT_KINDS or not self.changes(values):
            return values
        redacted = [self.redact_all(value) for value in values.ravel().tolist()]
        # The redacted text may be longer than the width of the old dtype.
        dtype = object if values.dtype.kind == "O" else None
        return np.array(redacted, dtype).reshape(values.shape)

    def _redacted_mapping(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        redacted: dict[Any, Any] = {}
        for key, inner in value.items():
            new_key, number = self.redact_all(key), 1
            while new_key in redacted:
                number += 1
                new_key = f"{self.redact_all(key)} ({number})"
            redacted[new_key] = self.redact_all(inner)
        return redacted


class TenantIsolation:
    """Puts keys into the namespace of one tenant. Two tenants, or two keys, never give the same name.

    Raises InvalidInput for an empty tenant and for one with a colon, which ends the tenant's name in a key: tenants
    have 1 to 64 characters of a-z, 0-9, '.', '_' or '-'.
    """

    def __init__(self, tenant_id: str) -> None:
        self.tenant_id: Final = parse_name("tenant", tenant_id)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> TenantIsolation:
        """The tenant of this process: PENSTOCK_TENANT_ID, or `default`. environ: None for the process's own."""
        environ = os.environ if environ is None else environ
        return cls(environ.get(_TENANT_VARIABLE) or "default")

    def namespace_key(self, key: str) -> str:
        """`<tenant>:<key>`."""
        return f"{self.tenant_id}:{key}"


def redactor_of(privacy: PrivacyConfig) -> InputRedactor:
    """The redactor of these settings; without patterns, detectors and entities it changes nothing.

    Raises ConfigurationError, also where Presidio is needed and not installed.
    """
    finders: list[TextFinder] = []
    if privacy.presidio_entities:
        # Here: it loads several hundred modules.
        from penstock.safety.presidio import presidio_finder

        finders.append(presidio_finder(privacy.presidio_entities))
    return InputRedactor(privacy.redact_patterns, detectors=privacy.redact_detectors, finders=finders)


def _texts(value: object) -> Iterator[bytes]:
    """Every text in nested data, as bytes."""
    if isinstance(value, str):
        yield value.encode("utf-8", "surrogatepass")
    elif isinstance(value, bytes | bytearray | memoryview):
        yield bytes(value)
    elif isinstance(value, np.ndarray):
        if value.dtype.kind in _TEXT_KINDS:
            yield from chain.from_iterable(map(_texts, value.ravel().tolist()))
    elif isinstance(value, Mapping):
        yield from chain.from_iterable(map(_texts, chain.from_iterable(value.items())))
    elif isinstance(value, list | tuple | AbstractSet):
        yield from chain.from_iterable(map(_texts, value))


def _whole(_raw: bytes, match: Match) -> Iterator[_Span]:
    yield _Span(match.start(), match.end())


def _payment_cards(raw: bytes, match: Match) -> Iterator[_Span]:
    """The card numbers in one run of digits and single separators: whole groups, 13 to 19 digits, with Luhn's sum."""
    groups = [_Span(*group.span()) for group in _DIGITS.finditer(raw, match.start(), match.end())]
    place = 0
    while place < len(groups):
        last = _card_end(raw, groups, place)
        if last is not None:
            yield _Span(groups[place].start, groups[last].end)
            place = last
        place += 1


def _card_end(raw: bytes, groups: Sequence[_Span], first: int) -> int | None:
    """The last group of the longest card number that begins with this group."""
    digits, found = b"", None
    for place in range(first, len(groups)):
        group = raw[slice(*groups[place])]
        if len(digits) + len(group) >= _CARD_DIGITS.stop:
            break
        digits += group
        if len(digits) in _CARD_DIGITS and _has_luhn_sum(digits):
            found = place
    return found


def _has_luhn_sum(digits: bytes) -> bool:
    """ISO/IEC 7812-1, annex B. A number of an issuer does not begin with 0."""
    numbers = [digit - ord("0") for digit in reversed(digits)]
    doubled = sum(sum(divmod(2 * number, 10)) for number in numbers[1::2])
    return digits[:1] != b"0" and (sum(numbers[::2]) + doubled) % 10 == 0


def _social_security(raw: bytes, match: Match) -> Iterator[_Span]:
    """Numbers that the US Social Security Administration can have given; parts of longer numbers are none."""
    start, end = match.start(), match.end()
    area, group, serial = raw[start : start + 3], raw[start + 4 : start + 6], raw[end - 4 : end]
    is_part = raw[max(start - 1, 0) : start].isdigit() or raw[end : end + 1].isdigit()
    if raw[start + 3] == raw[start + 6] and not (
        is_part or _NO_SSN_AREA.match(area) or group == b"00" or serial == b"0000"
    ):
        yield _Span(start, end)


DETECTORS: Final[Mapping[str, _Detector]] = {
    # Cards are written in groups of three digits and more. Numbers in a list and dates are in smaller ones.
    "payment_card": _Detector("[0-9]{3,}(?:[ -][0-9]{3,})*", _payment_cards),
    "email": _Detector(r"[\pL\pN._%+'-]+@(?:[\pL\pN](?:[\pL\pN-]*[\pL\pN])?\.)+[\pL]{2,}", _whole),
    "ssn": _Detector("[0-9]{3}[ -][0-9]{2}[ -][0-9]{4}", _social_security),
}
"""The built-in detectors by name: payment cards of 13 to 19 digits (plain, spaced, dashed), e-mail addresses, US social
security numbers (spaced or dashed)."""
