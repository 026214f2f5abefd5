"""A worker as users run it, whose Python models have a faster form: `python -m tests.faults.formed_worker FOLDER NAME`.

The form answers what the model answers, in a tenth of its time, until FOLDER/NAME says otherwise: `raise`, or `drift`
for answers that differ by a thousandth. Each of its forwards for jobs is a line of FOLDER/forwards: the name of the
worker, unix milliseconds and rows.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

__all__ = ["FORM", "MODEL_SOURCE"]

FORM: Final = "prepacked"
"""A form that is tried after two seconds of forwards."""
MODEL_SOURCE: Final = """
import time

def build():
    def forward(inputs):
        time.sleep(0.02)
        return {"y": inputs["x"] * 2}

    return forward
"""
_THREADS: Final = ("model", "drain")
"""Those that run jobs. The optimizer runs the form, too."""


def _formed(folder: Path, name: str) -> None:
    """Give the runtime of Python packages the form."""
    from penstock.workers.runtime import python_entrypoint
    from penstock.workers.runtime.base import Prepared
    from penstock.workers.runtime.forms import Forms, Forward

    runtime: Any = python_entrypoint.PythonRuntime
    begin, run = runtime.__init__, runtime.run

    def forward(prepared: Prepared) -> dict[str, Any]:
        fault = (folder / name).read_text() if (folder / name).exists() else ""
        if threading.current_thread().name in _THREADS:
            with (folder / "forwards").open("a") as log:
                log.write(f"{name} {time.time() * 1000:.3f} {prepared.rows}\n")
        if fault == "raise":
            raise RuntimeError("a kernel is gone")
        time.sleep(0.002)
        return {"y": prepared.payload["x"] * (2.002 if fault == "drift" else 2)}

    def begin_with_forms(self: Any, *arguments: Any, **options: Any) -> None:
        begin(self, *arguments, **options)
        self.forms = Forms(lambda prepared: dict(run(self, prepared)))

    def candidates(self: Any, compiler: object) -> Mapping[str, Callable[[], Forward]]:
        return {FORM: lambda: forward}

    runtime.__init__ = begin_with_forms
    runtime.run = lambda self, prepared: self.forms.run(prepared)
    runtime.candidates = candidates


def main(folder: str, name: str) -> None:
    """Runs the worker until a signal ends it."""
    _formed(Path(folder), name)
    from penstock.workers import app as worker_app

    worker_app.app.worker_main(["worker", "-P", "solo", "-c", "1", "-n", name])


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main(*sys.argv[1:])
