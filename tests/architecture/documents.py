"""The documents as tests see them: headings, links, code spans, and blocks of code with what becomes of each.

    README.md, CONTRIBUTING.md, SECURITY.md, docs/**/*.md (written) and docs/generate.py's pages (generated) -> Document

A Python block is run, unless it is a file of a model (```python title="models/...") or the line before it says
`<!-- not run: reason -->`.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType
from typing import Literal

from tests.servers import ROOT

__all__ = ["Block", "Document", "documents", "generated", "script", "written"]

_FENCE = re.compile(r"^(?:<!-- not run: (?P<reason>[^\n]*) -->\n)?```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S)
_TITLE = re.compile(r'title="([^"]+)"')
_LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.M)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the file that it is, if any, and why it is not run, if so."""

    language: str
    text: str
    file: str = ""
    reason: str | None = None

    @property
    def fate(self) -> Literal["run", "file", "not run", "text"]:
        """What the tests do with it."""
        if self.file:
            return "file"
        if self.language != "python":
            return "text"
        return "run" if self.reason is None else "not run"


@dataclass(frozen=True)
class Document:
    """One page; `path` is relative to the repository."""

    path: Path
    text: str

    @cached_property
    def blocks(self) -> list[Block]:
        """Its fenced blocks, in order."""
        return [
            Block(found["info"].partition(" ")[0], found["text"], _title(found["info"]), found["reason"])
            for found in _FENCE.finditer(self.text)
        ]

    @cached_property
    def prose(self) -> str:
        """Its text without the fenced blocks."""
        return _FENCE.sub("", self.text)

    @cached_property
    def spans(self) -> list[str]:
        """Its inline code."""
        return re.findall(r"`([^`\n]+)`", self.prose)

    @cached_property
    def links(self) -> list[str]:
        """Targets of its links and pictures, as written."""
        return _LINK.findall(re.sub(r"`[^`\n]*`", "", self.prose))

    @cached_property
    def anchors(self) -> set[str]:
        """Of its headings, as the site and as GitHub make them; most are the same."""
        headings = [re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", each) for each in _HEADING.findall(self.prose)]
        return {_site_anchor(each) for each in headings} & {_hub_anchor(each) for each in headings}

    def runs(self) -> list[str]:
        """The Python blocks that a test runs, in order."""
        return [block.text for block in self.blocks if block.fate == "run"]

    def commands(self) -> Iterator[str]:
        """Every `penstock ...` that it shows, in prose and in blocks that are no Python."""
        yield from (span for span in self.spans if span.startswith("penstock "))
        for block in self.blocks:
            if block.language in ("", "text"):
                yield from (line for line in block.text.splitlines() if line.startswith("penstock "))


def _title(info: str) -> str:
    found = _TITLE.search(info)
    return found[1] if found else ""


def _site_anchor(heading: str) -> str:
    """As markdown.extensions.toc does."""
    plain = unicodedata.normalize("NFKD", heading).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def _hub_anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@cache
def written() -> dict[str, Document]:
    """The committed documents, by path."""
    paths = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")]
    found = [path.relative_to(ROOT) for path in (*paths, *sorted((ROOT / "docs").rglob("*.md")))]
    return {str(path): Document(path, (ROOT / path).read_text()) for path in found}


@cache
def generated() -> dict[str, Document]:
    """The pages that the site's build makes from the code, by the path that they have there."""
    pages: dict[str, str] = script("generate").pages()
    return {f"docs/{path}": Document(Path("docs") / path, text) for path, text in pages.items()}


def documents() -> dict[str, Document]:
    """All of them."""
    return written() | generated()


@cache
def script(name: str) -> ModuleType:
    """A program of docs/, which is no package; it finds the others beside it."""
    if (folder := str(ROOT / "docs")) not in sys.path:
        sys.path.append(folder)
    place = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert place is not None
    assert place.loader is not None
    module = importlib.util.module_from_spec(place)
    sys.modules[place.name] = module
    place.loader.exec_module(module)
    return module
