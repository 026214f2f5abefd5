"""The part of PromQL that the dashboards use: an expression -> its selectors, and the labels of its result.

    expr       = sum {"or" sum}            sum  = product {("+" | "-") product}
    product    = unary {("*" | "/") unary} unary = number | "(" expr ")" | aggregation | function | selector
    aggregation = name ["by" "(" labels ")"] "(" expr ")"
    selector   = metric ["{" label op string {"," label op string} "}"] ["[" range "]"]

Everything that is not in it is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["Expression", "PromqlError", "Sample", "Selector", "read"]

_TOKEN: Final = re.compile(r'\s*([A-Za-z_]\w*|\d+(?:\.\d+)?|"[^"]*"|=~|!~|!=|[=(){},+*/-]|\[[^\]]*\])')
_AGGREGATIONS: Final = ("sum", "max", "min", "avg", "count")
_RANGES: Final = ("[$__rate_interval]", "[5m]")


class PromqlError(ValueError):
    """The expression has no meaning for the samples that exist."""


@dataclass(frozen=True)
class Sample:
    """The samples of one name. `histogram`: one of the three names of a histogram."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    labels: frozenset[str]


@dataclass(frozen=True)
class Selector:
    """The series of a sample that an expression selects. matchers: (label, operator, value)."""

    sample: Sample
    matchers: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True)
class Expression:
    """labels: those of the result."""

    labels: frozenset[str]
    selectors: tuple[Selector, ...]


@dataclass(frozen=True)
class _Value:
    labels: frozenset[str]
    range_of: Sample | None = None
    is_number: bool = False


def read(text: str, samples: Mapping[str, Sample]) -> Expression:
    """Raises PromqlError for a name, a label or a use that the samples do not have."""
    reader = _Reader(text, samples)
    value = reader.expression()
    if reader.here:
        raise PromqlError(f"{reader.here!r} comes after the end of {text}")
    return Expression(_instant(value).labels, tuple(reader.selectors))


class _Reader:
    def __init__(self, text: str, samples: Mapping[str, Sample]) -> None:
        self._samples = samples
        self._tokens = _tokens(text)
        self.selectors: list[Selector] = []

    @property
    def here(self) -> str:
        return self._tokens[0] if self._tokens else ""

    def expression(self) -> _Value:
        value = self._sum()
        while self._skip("or"):
            value = _joined(value, self._sum())
        return value

    def _sum(self) -> _Value:
        value = self._product()
        while self._skip("+") or self._skip("-"):
            value = _joined(value, self._product())
        return value

    def _product(self) -> _Value:
        value = self._unary()
        while self._skip("*") or self._skip("/"):
            value = _joined(value, self._unary())
        return value

    def _unary(self) -> _Value:
        word = self._next()
        if re.match(r"\d", word):
            return _Value(frozenset(), is_number=True)
        if word == "(":
            return self._closed(self.expression())
        if word in _AGGREGATIONS:
            return self._aggregation()
        if word in ("rate", "increase"):
            return self._growth(word)
        if word == "histogram_quantile":
            return self._quantile()
        if word == "vector":
            self._expect("(")
            return self._closed(_Value(self._number().labels))
        return self._selector(word)

    def _aggregation(self) -> _Value:
        kept = self._names() if self._skip("by") else frozenset()
        self._expect("(")
        value = self._closed(_instant(self.expression()))
        if unknown := kept - value.labels:
            raise PromqlError(f"no series has {sorted(unknown)} here")
        return _Value(kept)

    def _growth(self, name: str) -> _Value:
        self._expect("(")
        value = self._closed(self.expression())
        if value.range_of is None:
            raise PromqlError(f"{name} needs a range")
        if value.range_of.kind == "gauge":
            raise PromqlError(f"{name} of the gauge {value.range_of.name}")
        return _Value(value.labels)

    def _quantile(self) -> _Value:
        self._expect("(")
        self._number()
        self._expect(",")
        first = len(self.selectors)
        value = self._closed(_instant(self.expression()))
        if "le" not in value.labels or not all(each.sample.name.endswith("_bucket") for each in self.selectors[first:]):
            raise PromqlError("histogram_quantile needs buckets by le")
        return _Value(value.labels - {"le"})

    def _selector(self, name: str) -> _Value:
        sample = self._samples.get(name)
        if sample is None:
            raise PromqlError(f"there is no metric {name!r}")
        self.selectors.append(Selector(sample, tuple(self._matchers(sample))))
        if self.here.startswith("["):
            if (window := self._next()) not in _RANGES:
                raise PromqlError(f"the range {window}")
            return _Value(sample.labels, range_of=sample)
        if sample.kind == "histogram":
            raise PromqlError(f"{name} without rate")
        return _Value(sample.labels)

    def _matchers(self, sample: Sample) -> Iterable[tuple[str, str, str]]:
        if not self._skip("{"):
            return
        while True:
            label, operator, value = self._next(), self._next(), self._next()
            if label not in sample.labels:
                raise PromqlError(f"{sample.name} has no label {label!r}")
            if operator not in ("=", "!=", "=~", "!~") or not value.startswith('"'):
                raise PromqlError(f"the matcher {label}{operator}{value}")
            yield label, operator, value.strip('"')
            if self._skip("}"):
                return
            self._expect(",")

    def _names(self) -> frozenset[str]:
        self._expect("(")
        names = {self._next()}
        while self._skip(","):
            names.add(self._next())
        self._expect(")")
        return frozenset(names)

    def _number(self) -> _Value:
        value = self._unary()
        if not value.is_number:
            raise PromqlError("a number is missing")
        return value

    def _closed(self, value: _Value) -> _Value:
        self._expect(")")
        return value

    def _next(self) -> str:
        if not self._tokens:
            raise PromqlError("the expression ends too early")
        return self._tokens.pop(0)

    def _skip(self, token: str) -> bool:
        if self.here != token:
            return False
        self._tokens.pop(0)
        return True

    def _expect(self, token: str) -> None:
        if not self._skip(token):
            raise PromqlError(f"{token!r} is missing before {self.here!r}")


def _tokens(text: str) -> list[str]:
    found, at = [], 0
    while at < len(text.rstrip()):
        match = _TOKEN.match(text, at)
        if match is None:
            raise PromqlError(f"{text[at:]!r} is not understood")
        found.append(match[1])
        at = match.end()
    return found


def _instant(value: _Value) -> _Value:
    if value.range_of is not None:
        raise PromqlError(f"a range of {value.range_of.name} without rate")
    return value


def _joined(left: _Value, right: _Value) -> _Value:
    """Series are joined by equal labels: with different ones the result would be empty."""
    if left.is_number or right.is_number:
        return _Value(_instant(left).labels | _instant(right).labels, is_number=left.is_number and right.is_number)
    if _instant(left).labels != _instant(right).labels:
        raise PromqlError(f"{sorted(left.labels)} and {sorted(right.labels)} do not match")
    return left
