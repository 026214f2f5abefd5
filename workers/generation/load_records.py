"""What a load on this machine has found -> files -> the next load of the same need not find it again.

    kind, facts -> SHA-256 -> <folder>/<kind>-<hash>.json: facts, found

The facts are all that the finding depends on: processor, libraries, this package's own source, the model's files. Any
other fact is another file. A file that cannot be read or written is as none: the load measures and proves once more.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from penstock.workers.runtime import prepacked, torch_device
from penstock.workers.runtime.cpu import cpu_label

__all__ = ["LoadRecords", "files_of", "machine"]


class LoadRecords:
    """folder: None keeps nothing."""

    def __init__(self, folder: str | Path | None) -> None:
        self._folder: Final = None if folder is None else Path(folder).expanduser()

    def read(self, kind: str, facts: Mapping[str, Any]) -> Any:
        """What was found for these facts; None: nothing is known."""
        if self._folder is None:
            return None
        try:
            if not _is_private(self._folder):
                return None
            record = json.loads(self._path(self._folder, kind, facts).read_bytes())
        except (OSError, ValueError):
            return None
        return record.get("found") if isinstance(record, dict) and record.get("facts") == facts else None

    def write(self, kind: str, facts: Mapping[str, Any], found: Any) -> None:
        """Whole files only: other processes may read and write the same."""
        if self._folder is None:
            return
        path = self._path(self._folder, kind, facts)
        draft = path.with_suffix(f".{os.getpid()}.{threading.get_ident()}")
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not _is_private(self._folder):
                return
            with open(draft, "x") as file:
                json.dump({"facts": facts, "found": found}, file)
            draft.replace(path)

    @staticmethod
    def _path(folder: Path, kind: str, facts: Mapping[str, Any]) -> Path:
        plain = json.dumps(facts, sort_keys=True)
        return folder / f"{kind}-{hashlib.sha256(plain.encode()).hexdigest()[:32]}.json"


@cache
def machine() -> dict[str, str]:
    """The processor, the libraries that compute, and the source of this package and of what it computes with."""
    source = hashlib.sha256()
    for file in [*sorted(Path(__file__).parent.glob("*.py")), *map(Path, (prepacked.__file__, torch_device.__file__))]:
        source.update(file.read_bytes())
    return {
        "cpu": f"{_cpu_name()} {cpu_label()}",
        "torch": version("torch"),
        "transformers": version("transformers"),
        "source": source.hexdigest(),
    }


def files_of(folder: Path) -> list[list[Any]]:
    """Name, size and time of change of each file: other files are another model."""
    found = [(path, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return [[path.name, stat.st_size, stat.st_mtime_ns, stat.st_ino] for path, stat in found]


def _is_private(folder: Path) -> bool:
    """Whether no other user may write there. What another user wrote must not stand in for a proof."""
    found = folder.stat()
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()
