"""All tests, in three processes side by side: `python -m tests [PYTEST OPTION]...`.

Those that measure time, or wait for it, are the first; those that start stacks and programs of their own the second;
those that mostly compute the third, and what it takes the others spend waiting. Their output follows at their ends.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Final

__all__ = ["main"]

_HERE: Final = Path(__file__).parent
_START_PROGRAMS: Final = frozenset({"architecture", "benchmarks", "compose", "threats"})
_COMPUTE: Final = frozenset({"conformance", "registry", "workers"})
_NOTHING_COLLECTED: Final = 5


def main(options: list[str]) -> int:
    """Runs them all; returns the first exit status that is not a success."""
    groups: list[list[Path]] = [[], [], []]
    for path in _tests_in(_HERE):
        groups[1 if path.name in _START_PROGRAMS else 2 if path.name in _COMPUTE else 0].append(path)
    with ExitStack() as exits:
        beside = [_Beside(exits, _pytest(group, options)) for group in groups[1:]]
        statuses = [subprocess.run(_pytest(groups[0], options), check=False).returncode]
        statuses += [each.finish() for each in beside]
    return next((status for status in statuses if status not in (0, _NOTHING_COLLECTED)), 0)


class _Beside:
    """A process whose output is printed when it has ended; it ends with `exits`."""

    def __init__(self, exits: ExitStack, command: list[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `exits`
        exits.enter_context(self._output)
        self._process = subprocess.Popen(command, stdout=self._output, stderr=subprocess.STDOUT)
        exits.callback(self._end)

    def finish(self) -> int:
        status = self._process.wait()
        self._output.seek(0)
        sys.stdout.write(self._output.read().decode(errors="replace"))
        sys.stdout.flush()
        return status

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()


def _tests_in(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.name.startswith("test_") or (path / "__init__.py").exists())


def _pytest(paths: list[Path], options: list[str]) -> list[str]:
    # A cache each: they would write to one at the same time.
    cache = f"cache_dir=.pytest_cache/{paths[0].name}"
    return [sys.executable, "-m", "pytest", "-o", cache, *options, *map(str, paths)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
