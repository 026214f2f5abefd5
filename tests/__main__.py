"""Runs the tests, some processes side by side: `python -m tests [--all | --long | --no-server] [PYTEST OPTION]...`.

    (nothing)    `make test`: everything but what is marked `slow` or `install`
    --long       `make test-all`: what `make test` leaves out: repeated faults, the second redis-server and so on
    --all        both in one run
    --no-server  `make check`: what needs no server, without whole programs and models of a framework

Each unit is a pytest process of its own, and six run at a time: most tests wait, for servers, leases or
models that sleep. The units that take longest come first. The output of a unit follows when it has ended.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

__all__ = ["main", "units"]

_HERE: Final = Path(__file__).parent
_AT_ONCE: Final = 6
_NOTHING_COLLECTED: Final = 5
_MODES: Final = {
    "": ["-m", "not slow and not install"],
    "--long": ["-m", "slow or install", "--timeout=900"],
    "--all": ["--timeout=900"],
    "--no-server": ["-m", "not slow and not install", "--no-server"],
}
_OTHER_FAULTS: Final = (
    *("promotions", "random_kills", "redelivery", "rolling_restart", "streaming_models", "subscribers"),
    *("version_skew", "webhooks", "worker_dies", "worker_freezes"),
)
"""Half of the time of all faults."""
_TEXT_FLOWS: Final = (
    *("generation", "generation_faults", "generation_options", "generation_takeover"),
    *("text_server", "unequal_engines"),
)
_SAFETY_FLOWS: Final = ("canary", "rollback", "rollout", "safety_demo", "shadow")
_UNITS: Final = (
    "flow/test_generate_demo.py",
    " ".join(f"flow/test_{name}.py" for name in _TEXT_FLOWS),
    " ".join(f"flow/test_{name}.py" for name in _SAFETY_FLOWS),
    "flow",
    "producers",
    "workers/generation",
    "simulation architecture",
    "faults",
    " ".join(f"faults/test_{name}.py" for name in _OTHER_FAULTS),
    "conformance benchmarks",
    "compose/stack compose/commands",
    "workers/cache workers/process workers/celery_bridge workers/batching workers/observe",
    "compose",
    "registry safety",
    "workers",
    "threats",
    "flow/test_celery.py flow/test_demo.py flow/test_formats.py flow/test_shared_state.py",
    "workers/levels workers/runtime workers/compilation workers/frameworks",
    "workers/versions",
)
"""The longest first; what is in none of them is the last unit."""
_NOT_BETWEEN_EDITS: Final = (
    *("benchmarks", "compose", "faults", "flow", "install", "simulation", "threats"),
    *("workers/compilation", "workers/frameworks", "workers/levels", "workers/runtime"),
)
"""Whole programs, and models of a framework: both take longer than a programmer waits."""


def main(arguments: Sequence[str]) -> int:
    """Runs them all; returns the first exit status that is not a success."""
    # As Ctrl-C does: SystemExit ends the units, too.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    mode = arguments[0] if arguments and arguments[0] in _MODES else ""
    options = [*_MODES[mode], *arguments[bool(mode) :]]
    waiting = [_pytest(unit, options) for unit in units(_NOT_BETWEEN_EDITS if mode == "--no-server" else ())]
    running: list[_Running] = []
    statuses: list[int] = []
    try:
        while waiting or running:
            while waiting and len(running) < _AT_ONCE:
                running.append(_Running(waiting.pop(0)))
            for ended in [each for each in running if each.has_ended]:
                running.remove(ended)
                statuses.append(ended.show())
            time.sleep(0.1)
    finally:
        for each in running:
            each.kill()
    return next((status for status in statuses if status not in (0, _NOTHING_COLLECTED)), 0)


class _Running:
    """A process whose output is kept until it has ended."""

    def __init__(self, command: list[str]) -> None:
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `show` and `kill`
        # Without bytecode each unit, and each worker that it starts, compiles every module anew.
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._process = subprocess.Popen(command, env=environment, stdout=self._output, stderr=subprocess.STDOUT)

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def show(self) -> int:
        """Prints the output; returns the exit status."""
        self._output.seek(0)
        sys.stdout.write(self._output.read().decode(errors="replace"))
        sys.stdout.flush()
        self._output.close()
        return self._process.returncode

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self._output.close()


def units(left_out: Sequence[str] = ()) -> list[list[Path]]:
    """The folders and files of each unit; a folder inside of which another unit lies is split into its entries.

    left_out: folders whose tests are in no unit.
    """
    units = [[_HERE / name for name in unit.split()] for unit in _UNITS]
    named = {path for unit in units for path in unit} | {_HERE / name for name in left_out}
    units.append([_HERE])
    parted = [[part for path in unit for part in _parts(path, named - {path})] for unit in units]
    kept = [[path for path in unit if not any(path.is_relative_to(_HERE / out) for out in left_out)] for unit in parted]
    return [unit for unit in kept if unit]


def _parts(path: Path, others: set[Path]) -> list[Path]:
    """The path, or its entries without those that are others' where some of them are."""
    if not any(other.is_relative_to(path) for other in others):
        return [path]
    entries = [entry for entry in sorted(path.iterdir()) if entry not in others and _holds_tests(entry)]
    return [part for entry in entries for part in _parts(entry, others)]


def _holds_tests(path: Path) -> bool:
    return path.name.startswith("test_") or (path / "__init__.py").exists()


def _pytest(paths: list[Path], options: list[str]) -> list[str]:
    # A cache each: they would write to one at the same time.
    cache = f"cache_dir=.pytest_cache/{paths[0].relative_to(_HERE).as_posix().replace('/', '-')}"
    return [sys.executable, "-m", "pytest", "-o", cache, *options, *map(str, paths)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
