"""All tests, in two processes side by side: `python -m tests [PYTEST OPTION]...`.

Those that measure time, or wait for it, are one process; all others run beside it, and their output follows at its
end. More processes than that, and on two cores the first would measure the second.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["main"]

_HERE: Final = Path(__file__).parent
_WATCHES_THE_CLOCK: Final = frozenset({"faults", "flow", "workers"})
_TIMELESS: Final = frozenset({"frameworks", "runtime"})
"""Folders of tests/workers that only compute."""
_NOTHING_COLLECTED: Final = 5


def main(options: list[str]) -> int:
    """Runs both; returns the first exit status that is not a success."""
    found = _tests_in(_HERE)
    watching = [path for path in found if path.name in _WATCHES_THE_CLOCK - {"workers"}]
    others = [path for path in found if path.name not in _WATCHES_THE_CLOCK]
    for path in _tests_in(_HERE / "workers"):
        (others if path.name in _TIMELESS else watching).append(path)
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen(_pytest(others, options), stdout=output, stderr=subprocess.STDOUT)
        try:
            statuses = [subprocess.run(_pytest(watching, options), check=False).returncode, beside.wait()]
        finally:
            beside.kill()
            beside.wait()
        output.seek(0)
        sys.stdout.write(output.read().decode(errors="replace"))
    return next((status for status in statuses if status not in (0, _NOTHING_COLLECTED)), 0)


def _tests_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith("test_") or (path / "__init__.py").exists())


def _pytest(paths: list[Path], options: list[str]) -> list[str]:
    # A cache each: they would write to one at the same time.
    cache = f"cache_dir=.pytest_cache/{paths[0].name}"
    return [sys.executable, "-m", "pytest", "-o", cache, *options, *map(str, paths)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
