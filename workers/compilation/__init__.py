"""A loaded model -> the same model compiled: built in a process of its own, kept, checked, and only then offered.

    runtime.compilable(form) -> TorchCompiler.compile -> [artifacts: compiled before?] -> CompiledForward
                                                     no -> build, in a child process -> seal

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
