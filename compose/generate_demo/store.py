"""The writer of the demo under the home of Penstock: trained once, and found again by what it was made from.

<home>/demo-writer/
  lock            held while a model is made: a second demo waits, and then has it, too
  making-XXXX/    removed at the end; what a killed run has left, by the next one
  <digest>/       appears whole, by one rename
    made-from.json    the recipe and this Python, and what came of them
    writer/1/         a package of format `generate`
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import yaml

from penstock.compose.generate_demo.recipe import Recipe, Result
from penstock.registry.errors import ConfigurationError

__all__ = ["MODEL", "SEATS", "StoredWriter", "ready_writer"]

MODEL: Final = "writer"
SEATS: Final = 8
_FOLDER: Final = "demo-writer"
_MARKER: Final = "made-from.json"
_MAKING: Final = "making-"


@dataclass(frozen=True, slots=True)
class StoredWriter:
    """models_root: the folder with the package. is_new: it was trained just now."""

    models_root: Path
    result: Result
    is_new: bool


def ready_writer(home: Path, recipe: Recipe, make: Callable[[Path], Result]) -> StoredWriter:
    """The writer of this recipe and this Python; `make` trains it into an empty folder where it is not there.

    Raises ConfigurationError where the home cannot be written to.
    """
    source = {"recipe": asdict(recipe), "python": sys.version}
    digest = hashlib.sha256(json.dumps(source, sort_keys=True).encode()).hexdigest()[:16]
    folder = home / _FOLDER
    if (found := _read(folder / digest, source)) is not None:
        return found
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(folder / "lock"):
            # Another demo may have made it meanwhile.
            return _read(folder / digest, source) or _made(folder, digest, source, make)
    except OSError as error:
        raise ConfigurationError(
            f"The model of the demo cannot be stored ({error.strerror}). Expected a PENSTOCK_HOME that this user may "
            "write to"
        ) from error


def _made(folder: Path, digest: str, source: Mapping[str, Any], make: Callable[[Path], Result]) -> StoredWriter:
    for left in folder.glob(f"{_MAKING}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_MAKING, dir=folder) as making:
        whole = Path(making) / "whole"
        package = whole / MODEL / "1"
        package.mkdir(parents=True)
        result = make(package)
        (package / "model.yaml").write_text(yaml.safe_dump(_spec(source["recipe"]["positions"]), sort_keys=False))
        (whole / _MARKER).write_text(json.dumps({**source, "result": asdict(result)}, indent=1) + "\n")
        target = folder / digest
        # One that has no marker, or another one, is none.
        shutil.rmtree(target, ignore_errors=True)
        whole.rename(target)
    return StoredWriter(target, result, is_new=True)


def _read(target: Path, source: Mapping[str, Any]) -> StoredWriter | None:
    try:
        marker = json.loads((target / _MARKER).read_text())
        if {name: marker[name] for name in source} != source:
            return None
        return StoredWriter(target, Result(**marker["result"]), is_new=False)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _spec(positions: int) -> dict[str, Any]:
    return {
        "name": MODEL,
        "version": "1",
        "format": "generate",
        "generate": {"max_model_len": positions, "max_num_seqs": SEATS, "kv_cache_mb": 16},
    }


@contextmanager
def _locked(file: Path) -> Iterator[None]:
    with file.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
