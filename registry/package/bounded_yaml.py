"""YAML -> plain data. A document whose reading costs far more than its size, or does not end, is refused."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.registry.errors import shown

__all__ = ["MAX_DOCUMENT_BYTES", "BadDocument", "read_document", "read_yaml"]

MAX_DOCUMENT_BYTES: Final = 64 * 1024
_MAX_DEPTH: Final = 32
_MAX_VALUES: Final = 20_000
"""With every alias followed: a few hundred bytes of aliases can stand for gigabytes."""
_MAX_DIGITS: Final = 1_000

_UNREADABLE: Final = (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError)
"""The errors of the parser. The last two it has for a value that does not fit its tag, such as `!!bool x`."""


class BadDocument(ValueError):
    """The text cannot be read. The message is the end of a line that begins with the file."""


def read_document(file: Path) -> bytes:
    """The bytes of a file, at most one more than a document may have. Raises OSError, BadDocument."""
    # A FIFO must not block the open.
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
            raise BadDocument(": found no regular file, expected one")
        # With one byte too many, `read_yaml` refuses the document.
        return opened.read(MAX_DOCUMENT_BYTES + 1)


def read_yaml(text: bytes) -> Any:
    """The document: mappings, lists, text, numbers and dates. Raises BadDocument."""
    if len(text) > MAX_DOCUMENT_BYTES:
        raise BadDocument(f": found {len(text)} bytes, expected at most {MAX_DOCUMENT_BYTES}")
    try:
        return yaml.load(text, Loader=_BoundedLoader)  # noqa: S506 - a SafeLoader that refuses more
    except _Unbounded as refusal:
        raise BadDocument(f", line {refusal.line}: {refusal}") from None
    except _UNREADABLE as error:
        mark = getattr(error, "problem_mark", None)
        raise BadDocument(f"{f', line {mark.line + 1}' if mark else ''}: not valid YAML") from None


class _Unbounded(Exception):
    """Valid YAML that is refused here."""

    def __init__(self, text: str, mark: yaml.Mark) -> None:
        super().__init__(text)
        self.line = mark.line + 1


class _BoundedLoader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """One node. Counts the depth before the parser recurses."""
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise _Unbounded(f"nested deeper than {_MAX_DEPTH} levels", self.get_mark())
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> yaml.Node | None:
        """The whole document, after it was measured with its aliases followed."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None:
            _measure(node, {})
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> Any:
        """A number of at most as many digits as Python converts to text."""
        if len(node.value) > _MAX_DIGITS:
            raise _Unbounded(f"found a number of {len(node.value)} digits", node.start_mark)
        return super().construct_yaml_int(node)


_BoundedLoader.add_constructor("tag:yaml.org,2002:int", _BoundedLoader.construct_yaml_int)


def _measure(node: yaml.Node, known: dict[int, tuple[int, int] | None]) -> tuple[int, int]:
    """(values, depth) of a node with its aliases followed."""
    if id(node) in known:
        found = known[id(node)]
        if found is None:
            raise _Unbounded("found an alias inside of what it names", node.start_mark)
        return found
    known[id(node)] = None
    if isinstance(node, yaml.MappingNode):
        _check_distinct(node)
    values, depth = 1, 1
    for child in _children(node):
        more, below = _measure(child, known)
        values, depth = values + more, max(depth, below + 1)
        if values > _MAX_VALUES or depth > _MAX_DEPTH:
            raise _Unbounded(f"more than {_MAX_VALUES} values or {_MAX_DEPTH} levels with aliases", node.start_mark)
    known[id(node)] = values, depth
    return values, depth


def _check_distinct(mapping: yaml.MappingNode) -> None:
    # The parser would silently take the last one.
    seen = set()
    for key, _ in mapping.value:
        if isinstance(key, yaml.ScalarNode):
            if (key.tag, key.value) in seen:
                raise _Unbounded(f"found {shown(key.value)} twice, expected distinct names", key.start_mark)
            seen.add((key.tag, key.value))


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
