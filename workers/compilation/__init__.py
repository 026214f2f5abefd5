"""A loaded model -> its compiled form: built in a child process, stored, checked, and only then returned.

    runtime.compilable(form) -> TorchCompiler.compile -> an artefact is stored? -> yes: checked -> CompiledForward
                                                     no: build, in a child process -> checked, sealed, stored

Importing this package imports no torch.
"""

from __future__ import annotations

from penstock.workers.compilation.compiler import TorchCompiler
from penstock.workers.compilation.forward import CompilationReport, CompiledForward
from penstock.workers.compilation.safety_monitor import TorchCompileSafetyMonitor

__all__ = [
    "CompilationReport",
    "CompiledForward",
    "TorchCompileSafetyMonitor",
    "TorchCompiler",
]
