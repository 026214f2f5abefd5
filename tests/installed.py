"""A distribution as pip installs it, in a folder that a test puts on the path."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent

__all__ = ["install"]


def install(folder: Path, module: str, source: str, entry_points: Mapping[str, Mapping[str, str]]) -> Path:
    """A module of this source, and the metadata of its distribution; returns the folder.

    entry_points: by group, the object of the module by the name of the entry point.
    """
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir(parents=True)
    (folder / f"{module}.py").write_text(dedent(source))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    lines = []
    for group, named in entry_points.items():
        lines += [f"[{group}]", *(f"{name} = {module}:{value}" for name, value in named.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder
