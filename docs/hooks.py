"""What MkDocs asks of us: the generated reference pages, as if they lay beside the written ones."""

from __future__ import annotations

from typing import Any

from generate import pages
from mkdocs.structure.files import File

__all__ = ["on_files"]


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of docs/generate.py to the site's files."""
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files
